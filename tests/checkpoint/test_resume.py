from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.checkpoint.layout import folder_name, unfinished_name
from surefoot.checkpoint.resume import Resume, find_resume, resolve_checkpoint
from surefoot.checkpoint.store import save
from surefoot.errors import RunError, UserError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The checkpoints folder of a run with steps 2 and 4."""
    folder = tmp_path / "runs" / "a" / "checkpoints"
    for step in (2, 4):
        save(folder, step, {"actor": {"w": torch.ones(2)}}, {"step": step}, keep_last=9)
    return folder


def code_of(folder: Path, word: str, used: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        find_resume(folder, word, used)
    return caught.value.code


def path_of(resume: Resume) -> Path:
    assert resume.checkpoint is not None
    return resume.checkpoint.path


def test_a_new_run_starts_at_the_beginning(tmp_path: Path):
    assert find_resume(tmp_path / "none", "auto").checkpoint is None
    assert find_resume(tmp_path / "none", "never").checkpoint is None


def test_auto_takes_the_newest_whole_one_and_names_what_it_leaves_out(run: Path):
    (run / folder_name(6)).mkdir()
    (run / unfinished_name(7)).mkdir()
    resume = find_resume(run, "auto")
    assert path_of(resume) == run / folder_name(4)
    assert len(resume.ignored) == 2
    assert folder_name(6) in resume.ignored[0]
    assert "interrupted" in resume.ignored[0]
    assert unfinished_name(7) in resume.ignored[1]


def test_folders_without_a_whole_one_are_refused_rather_than_started_from_zero(tmp_path: Path):
    (tmp_path / folder_name(6)).mkdir()
    with pytest.raises(UserError, match="step_000006: it has no manifest") as caught:
        find_resume(tmp_path, "auto")
    assert caught.value.code == "checkpoint-none-whole"


def test_no_pointer_file_is_needed_or_believed(run: Path):
    (run / "latest").write_text("step_000099")
    (run / "latest_checkpointed_iteration.txt").write_text("2")
    assert path_of(find_resume(run, "auto")) == run / folder_name(4)


def test_never_refuses_a_used_folder(run: Path, tmp_path: Path):
    assert code_of(run, "never") == "resume-used-folder"
    assert code_of(tmp_path / "empty", "never", used=True) == "resume-used-folder"


@pytest.mark.parametrize("path", ["runs/a", "runs/a/checkpoints", "runs/a/checkpoints/step_000004"])
def test_a_path_may_be_a_run_its_checkpoints_or_one_of_them(run: Path, tmp_path: Path, path: str):
    fresh = tmp_path / "runs" / "b" / "checkpoints"
    assert path_of(find_resume(fresh, str(tmp_path / path))) == run / folder_name(4)


def test_a_path_into_another_run_may_be_an_older_checkpoint(run: Path, tmp_path: Path):
    fresh = tmp_path / "runs" / "b" / "checkpoints"
    assert path_of(find_resume(fresh, str(run / folder_name(2)))) == run / folder_name(2)


def test_going_back_within_a_run_is_refused(run: Path):
    assert code_of(run, str(run / folder_name(2))) == "resume-newer-exists"
    assert path_of(find_resume(run, str(run / folder_name(4)))) == run / folder_name(4)


def test_another_runs_checkpoint_is_refused_once_this_run_has_its_own(run: Path, tmp_path: Path):
    other = tmp_path / "runs" / "b" / "checkpoints"
    save(other, 1, {}, {}, keep_last=1)
    assert code_of(other, str(run)) == "resume-newer-exists"


def test_a_path_that_is_not_there_names_its_neighbour(run: Path):
    with pytest.raises(UserError, match="step_000004") as caught:
        resolve_checkpoint(run / "step_00004")
    assert caught.value.code == "checkpoint-not-found"
    assert code_of(run, str(run / "nowhere" / "else")) == "checkpoint-not-found"


def test_a_folder_without_checkpoints_or_a_broken_one_is_refused(run: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert code_of(run, str(tmp_path / "empty")) == "checkpoint-not-found"
    (run / folder_name(4) / "state.json").unlink()
    with pytest.raises(UserError, match=r"state\.json is missing") as caught:
        resolve_checkpoint(run / folder_name(4))
    assert caught.value.code == "checkpoint-none-whole"


def test_a_damaged_newest_one_is_put_aside_and_the_run_goes_on_from_the_one_before(run: Path):
    file = run / folder_name(4) / "actor.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"actor\.safetensors is not what was written"):
        find_resume(run, str(run / folder_name(4)))  # asked for by name, it is refused
    assert resolve_checkpoint(run).path == run / folder_name(2)
    assert (run / folder_name(4)).is_dir()  # reading a run changes nothing
    resume = find_resume(run, "auto")
    assert path_of(resume) == run / folder_name(2)
    assert "damaged-step_000004 is left out: actor.safetensors" in resume.ignored[0]
    # It no longer counts: the next save with keep_last 1 leaves the new one, and the damaged one for people.
    save(run, 3, {"actor": {"w": torch.ones(2)}}, {"step": 3}, keep_last=1)
    assert sorted(p.name for p in run.iterdir()) == ["damaged-step_000004", folder_name(3)]
