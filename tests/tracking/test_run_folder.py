from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from surefoot.errors import RunError, UserError
from surefoot.tracking.api import Alarm
from surefoot.tracking.environment import git_state, versions
from surefoot.tracking.files import human_bytes, is_disk_full, write_atomic
from surefoot.tracking.run_folder import RunFolder, config_changes


def in_a_process(script: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


HOLDER = """
import sys, time
from surefoot.tracking.run_folder import RunFolder
folder = RunFolder({root!r}, "a")
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_in_the_folder_is_refused_and_told_who_holds_it(tmp_path: Path):
    holder = in_a_process(HOLDER.format(root=str(tmp_path)))
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=str(holder.pid)) as caught:
            RunFolder(tmp_path, "a")
        assert caught.value.code == "run-folder-locked"
        RunFolder(tmp_path, "b").close()
    finally:
        holder.kill()
        holder.wait()
    RunFolder(tmp_path, "a").close()  # a killed run leaves no lock behind


def test_one_process_cannot_hold_a_folder_twice(tmp_path: Path):
    folder = RunFolder(tmp_path, "a")
    with pytest.raises(UserError, match="this one"):
        RunFolder(tmp_path, "a")
    folder.close()
    RunFolder(tmp_path, "a").close()


def test_a_forked_child_that_outlives_the_run_does_not_keep_the_folder(tmp_path: Path):
    script = HOLDER.replace("time.sleep(60)", "import os\nif os.fork() == 0: time.sleep(20)\nos._exit(0)")
    run = in_a_process(script.format(root=str(tmp_path)), start_new_session=True)
    try:
        assert run.stdout.readline() == "held\n"
        run.wait()
        RunFolder(tmp_path, "a").close()
    finally:
        os.killpg(run.pid, 9)
        run.stdout.close(), run.stderr.close()


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError) as caught:
        RunFolder(tmp_path / "runs", "a")
    assert caught.value.code == "run-folder-unwritable"


def test_the_configuration_is_written_with_what_the_run_is_made_with(tmp_path: Path):
    folder = RunFolder(tmp_path, "a")
    assert folder.write_config("seed: 0\ntrain:\n  steps: 5\n") == []
    text = folder.config.read_text()
    assert "# surefoot " in text
    assert "# torch 2" in text
    assert "# python 3" in text
    assert "# git " in text
    assert yaml.safe_load(text) == {"seed": 0, "train": {"steps": 5}}
    assert folder.write_config("seed: 1\ntrain:\n  steps: 5\n") == ["seed: 0 -> 1"]


def test_config_changes_name_added_removed_and_nested_keys():
    before = {"a": 1, "b": {"c": [1, 2], "gone": True}}
    after = {"a": 1, "b": {"c": [1, 3], "new": 0.5}}
    assert config_changes(before, after) == ["b.c: [1, 2] -> [1, 3]", "b.new: None -> 0.5", "b.gone: True -> None"]


def test_versions_are_read_without_importing_anything_heavy():
    script = "import sys; from surefoot.tracking.environment import versions; versions(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"
    assert set(versions()) >= {"python", "surefoot", "torch", "transformers"}


def test_git_state_says_when_files_differ_from_the_commit(tmp_path: Path):
    assert git_state(tmp_path) is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "f").write_text("1")
    for arguments in (["init", "-q"], ["add", "f"], ["commit", "-qm", "m"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    commit = git_state(tmp_path)
    assert len(commit) == 40
    (tmp_path / "f").write_text("2")
    assert git_state(tmp_path) == f"{commit} (dirty)"


def test_the_run_id_stays_when_the_run_is_resumed(tmp_path: Path):
    folder = RunFolder(tmp_path, "a")
    identity = folder.run_id()
    folder.close()
    assert RunFolder(tmp_path, "a").run_id() == identity
    assert RunFolder(tmp_path, "b").run_id() != identity


def test_a_folder_is_used_once_it_has_steps_or_checkpoints(tmp_path: Path):
    folder = RunFolder(tmp_path, "a")
    folder.write_config("seed: 0")
    assert not folder.used
    folder.metrics.write_text('{"step": 1}\n')
    assert folder.used
    folder.metrics.write_text("")
    (folder.checkpoints / "step_000001").mkdir()
    assert folder.used


def test_rewinding_drops_what_is_about_to_be_made_again(tmp_path: Path):
    folder = RunFolder(tmp_path, "a")
    for step in (1, 2, 3):
        (folder.rollouts / f"step_{step:06d}.parquet").write_text("")
        folder.add_alarm(Alarm("alarm-kl", step, f"ä {step}"))
    folder.rewind(2)
    assert sorted(p.name for p in folder.rollouts.iterdir()) == ["step_000001.parquet", "step_000002.parquet"]
    assert [line["step"] for line in folder.read_alarms()] == [1, 2]
    folder.rewind(None)
    assert list(folder.rollouts.iterdir()) == []
    assert folder.read_alarms() == []


def test_the_summary_is_replaced_in_one_move(tmp_path: Path):
    folder = RunFolder(tmp_path, "a")
    folder.write_summary({"status": "finished"})
    folder.write_summary({"status": "stopped"})
    assert json.loads(folder.summary.read_text()) == {"status": "stopped"}
    assert [p.name for p in folder.path.glob(".summary*")] == []


KILLED_WRITER = """
import sys
from pathlib import Path
from surefoot.tracking.files import write_atomic
print("go", flush=True)
while True:
    write_atomic(Path({path!r}), "a" * 3_000_000)
    write_atomic(Path({path!r}), "b" * 3_000_000)
"""


def test_a_writer_killed_at_any_time_leaves_one_whole_version(tmp_path: Path):
    path = tmp_path / "summary.json"
    for delay in (0.0, 0.011, 0.023, 0.05):
        writer = in_a_process(KILLED_WRITER.format(path=str(path)))
        assert writer.stdout.readline() == "go\n"
        time.sleep(0.02 + delay)
        writer.kill()
        writer.wait()
        if path.exists():
            assert path.read_text() in ("a" * 3_000_000, "b" * 3_000_000)


def test_a_full_disk_leaves_the_old_file_and_says_which_and_how_much(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    script = f"""
import resource
from pathlib import Path
from surefoot.tracking.files import write_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
write_atomic(Path({str(path)!r}), "x" * 5000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"no room to write {path}" in done.stderr
    assert "RunError" in done.stderr
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_full_disk_is_known_by_errno_or_by_text():
    assert is_disk_full(OSError(28, "No space left on device"))
    assert is_disk_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not is_disk_full(OSError(13, "Permission denied"))
    assert not is_disk_full(ValueError("os error 2)"))


def test_the_alarm_about_the_full_disk_may_itself_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(tmp_path, "a")
    folder.alarms.symlink_to("/dev/full")
    folder.add_alarm(Alarm("alarm-disk-full", 1, "full"))
    with pytest.raises(RunError):
        folder.add_alarm(Alarm("alarm-kl", 1, "far"))


def test_bytes_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
