from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from surefoot.checkpoint.layout import folder_name, unfinished_name
from surefoot.checkpoint.store import load, newest_checkpoint, save, scan
from surefoot.errors import RunError


def content(step: int, numbers: int = 1000) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors that tell their step."""
    return {
        "actor": {"w": torch.full((numbers,), float(step)), "b": torch.arange(3) + step},
        "actor_optimizer": {"w.exp_avg": torch.full((numbers,), step / 2)},
    }


def is_of_step(path: Path, step: int) -> bool:
    checkpoint = load(path)
    tensors = {name: checkpoint.tensors(name) for name in checkpoint.components}
    same = all(torch.equal(tensors[c][n], t) for c, by_name in content(step).items() for n, t in by_name.items())
    return same and checkpoint.state == {"step": step} and checkpoint.manifest.step == step


def test_everything_comes_back_bit_for_bit(tmp_path: Path):
    generator = torch.Generator().manual_seed(3)
    tied = torch.randn(4, 5)
    tensors = {
        "actor": {
            "fp32": torch.randn(3, 4),
            "bf16": torch.randn(7).bfloat16(),
            "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
            "transposed": torch.randn(3, 4).T,
            "slice": torch.randn(10)[2:5],
            "scalar": torch.tensor(1.5),
            "empty": torch.empty(0, 3),
            "flag": torch.tensor([True, False]),
            "tied": tied,
            "tied_again": tied,
            "half_of_tied": tied[:2],
        },
        "rng": {"torch": generator.get_state(), "count": torch.tensor(2**40)},
        "nothing": {},
    }
    state = {"step": 5, "scheduler": {"last": [1e-5, 0.1 + 0.2]}, "cursor": "ä\ud83d", "none": None, "big": 2**60}
    path = save(tmp_path, 5, tensors, state, keep_last=1, config_yaml="seed: 1\n")
    back = load(path)
    assert back.components == ["actor", "rng", "nothing"]
    for component, by_name in tensors.items():
        loaded = back.tensors(component)
        assert set(loaded) == set(by_name)
        for name, tensor in by_name.items():
            assert loaded[name].dtype == tensor.dtype
            assert loaded[name].shape == tensor.shape
            as_bytes = [
                t.contiguous().flatten().view(torch.uint8) for t in (loaded[name].reshape(-1), tensor.reshape(-1))
            ]
            assert torch.equal(*as_bytes), name
    assert back.state == state
    assert back.config_yaml == "seed: 1\n"
    again = torch.Generator()
    again.set_state(back.tensors("rng")["torch"])
    assert torch.equal(torch.rand(4, generator=again), torch.rand(4, generator=generator))


def newest_path(folder: Path) -> Path | None:
    checkpoint, _ = newest_checkpoint(folder)
    return checkpoint.path if checkpoint else None


def test_only_the_last_ones_stay_and_pinned_ones_too(tmp_path: Path):
    for step in range(1, 7):
        path = save(tmp_path, step, content(step), {"step": step}, keep_last=2)
        if step == 2:
            (path / "KEEP").touch()
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder_name(s) for s in (2, 5, 6)]
    assert is_of_step(tmp_path / folder_name(2), 2)
    assert newest_path(tmp_path) == tmp_path / folder_name(6)


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    save(tmp_path, 1, content(9), {"step": 9}, keep_last=1)
    save(tmp_path, 1, content(1), {"step": 1}, keep_last=1)
    assert is_of_step(tmp_path / folder_name(1), 1)
    assert [p.name for p in tmp_path.iterdir()] == [folder_name(1)]


@pytest.mark.parametrize("file", ["actor.safetensors", "state.json", "config.yaml"])
def test_one_flipped_bit_is_found_and_named(tmp_path: Path, file: str):
    path = save(tmp_path, 1, content(1), {"step": 1}, keep_last=1, config_yaml="a: 1")
    raw = bytearray((path / file).read_bytes())
    raw[-1] ^= 1
    (path / file).write_bytes(raw)
    with pytest.raises(RunError, match=f"{file}.*digest differs") as caught:
        load(path)
    assert caught.value.code == "checkpoint-corrupt"


def test_a_missing_file_or_manifest_is_named(tmp_path: Path):
    path = save(tmp_path, 1, content(1), {"step": 1}, keep_last=1)
    (path / "actor.safetensors").unlink()
    with pytest.raises(RunError, match=r"actor\.safetensors has no bytes"):
        load(path)
    (path / "manifest.json").unlink()
    with pytest.raises(RunError, match="no manifest"):
        load(path)


def test_a_component_that_was_not_saved_is_an_error_not_an_empty_one(tmp_path: Path):
    path = save(tmp_path, 1, content(1), {"step": 1}, keep_last=1)
    with pytest.raises(RunError, match="critic"):
        load(path).tensors("critic")


def test_the_live_tensors_are_not_touched_by_what_is_loaded(tmp_path: Path):
    live = torch.ones(5)
    path = save(tmp_path, 1, {"actor": {"w": live}}, {}, keep_last=1)
    loaded = load(path).tensors("actor")["w"]
    loaded.add_(1)
    assert torch.equal(live, torch.ones(5))
    assert torch.equal(load(path).tensors("actor")["w"], torch.ones(5))


def fork_and_die_at(folder: Path, event: int, script) -> bool:
    """Run `script` in a child that vanishes at its `event`-th file operation in `folder`; True: it got through."""
    child = os.fork()
    if child == 0:
        counted = 0

        def hook(name: str, arguments: tuple) -> None:
            nonlocal counted
            if name in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate") and str(folder) in str(
                arguments
            ):
                counted += 1
                if counted == event:
                    os._exit(9)

        try:
            sys.addaudithook(hook)
            script()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 0


@pytest.mark.parametrize("again", [False, True], ids=["the next step", "the same step again"])
def test_killed_at_any_file_operation_some_whole_checkpoint_loads(tmp_path: Path, again: bool):
    event, through = 0, False
    while not through:
        event += 1
        folder = tmp_path / str(event)
        save(folder, 4, content(4), {"step": 4}, keep_last=1)
        new = 4 if again else 5
        through = fork_and_die_at(folder, event, lambda: save(folder, new, content(new), {"step": new}, keep_last=1))  # noqa: B023
        best = newest_path(folder)
        assert best is not None, event
        assert is_of_step(best, new if through else (load(best).manifest.step))
        assert load(best).manifest.step in (4, new)
        # The next save cleans up whatever was left.
        save(folder, 6, content(6), {"step": 6}, keep_last=1)
        assert [p.name for p in folder.iterdir()] == [folder_name(6)], event
        shutil.rmtree(folder)
    assert event > 15  # that many points were tried


def test_killed_at_random_moments_some_whole_checkpoint_loads(tmp_path: Path):
    """The same by SIGKILL from outside, which also hits within a write."""
    numbers, reached = 100_000, 0
    save(tmp_path, 0, content(0, numbers), {"step": 0}, keep_last=1)
    for delay in [0.02 + 0.001 * (37 * i % 101) for i in range(16)]:
        child = os.fork()
        if child == 0:
            try:
                for step in range(reached + 1, reached + 1000):
                    save(tmp_path, step, content(step, numbers), {"step": step}, keep_last=1)
            finally:
                os._exit(0)
        time.sleep(delay)
        os.kill(child, 9)
        os.waitpid(child, 0)
        best = newest_path(tmp_path)
        assert best is not None
        step = load(best).manifest.step
        assert step >= reached
        assert torch.equal(load(best).tensors("actor")["w"], torch.full((numbers,), float(step)))
        reached = step
    assert reached > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB. Needs the right to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if done.returncode:
        pytest.skip("no right to mount a small disk here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("taken", [0, 380_000, 450_000, 470_000, 480_000])
def test_a_full_disk_is_named_and_the_older_checkpoint_still_loads(small_disk: Path, taken: int):
    folder = small_disk / "checkpoints"
    save(folder, 4, content(4, 50_000), {"step": 4}, keep_last=1)
    (small_disk / "other").write_bytes(b"x" * taken)
    with pytest.raises(RunError, match="free on its disk") as caught:
        save(folder, 5, content(5, 100_000), {"step": 5}, keep_last=1)
    assert caught.value.code == "disk-full"
    assert str(folder / unfinished_name(5)) in str(caught.value)
    assert [p.name for p in folder.iterdir()] == [folder_name(4)]
    assert torch.equal(load(folder / folder_name(4)).tensors("actor")["w"], torch.full((50_000,), 4.0))


@pytest.mark.parametrize("limit", [10, 4100])
def test_a_file_size_limit_is_named_the_same_way(tmp_path: Path, limit: int):
    save(tmp_path, 4, content(4), {"step": 4}, keep_last=1)
    script = f"""
import resource
from pathlib import Path
from surefoot.checkpoint.store import save
from surefoot.errors import RunError
from tests.checkpoint.test_store import content
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, hard))
try:
    save(Path({str(tmp_path)!r}), 5, content(5), {{"step": 5}}, keep_last=1)
except RunError as error:
    code = error.code
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(code)
"""
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert child.stdout == "disk-full\n", child.stderr
    assert [one.name for one in scan(tmp_path)] == [folder_name(4)]
    assert is_of_step(tmp_path / folder_name(4), 4)


def test_the_manifest_tells_versions_and_the_configurations_digest(tmp_path: Path):
    first = json.loads((save(tmp_path, 1, {}, {}, 9, config_yaml="a: 1") / "manifest.json").read_text())
    second = json.loads((save(tmp_path, 2, {}, {}, 9, config_yaml="a: 2") / "manifest.json").read_text())
    assert first["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert first["config_hash"] != second["config_hash"]
