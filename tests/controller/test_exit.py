"""However a run on a cluster ends, it ends within half a minute, says why, and leaves no process and no memory."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ..tiny import save_tiny
from .tiny_run import metrics_of, start_run, tiny_config, wait_for_rows, write_config

WITHIN = 30  # seconds


def named(family: list[psutil.Process], *words: str) -> psutil.Process:
    """The process whose title or command line has one of these words."""
    return next(p for p in family if any(word in " ".join(p.cmdline()) for word in words))


def rank(driver: psutil.Process, family: list[psutil.Process]) -> None:
    named(family, "ray::TrainWorker").kill()


def sampler(driver: psutil.Process, family: list[psutil.Process]) -> None:
    named(family, "ray::RolloutWorker").kill()


def engine_core(driver: psutil.Process, family: list[psutil.Process]) -> None:
    named(family, "EngineCore").kill()


def raylet(driver: psutil.Process, family: list[psutil.Process]) -> None:
    named(family, "raylet/raylet").kill()


def kill_driver(driver: psutil.Process, family: list[psutil.Process]) -> None:
    driver.kill()


def interrupt(driver: psutil.Process, family: list[psutil.Process]) -> None:
    driver.send_signal(signal.SIGINT)


def freeze_rank(driver: psutil.Process, family: list[psutil.Process]) -> None:
    named(family, "ray::TrainWorker").suspend()


def in_shared_memory() -> set[str]:
    """What is there, without semaphores' names (32 bytes): they stay when Python's own tracker dies with its parent."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1], ids=["in turns", "ahead"])
@pytest.mark.parametrize(
    ("harm", "code", "says"),
    [
        (rank, 3, ["is gone", "worker-died"]),
        (engine_core, 3, ["engine-died", "worker-died"]),
        (sampler, 3, ["sampler-0 is gone"]),
        (kill_driver, -9, []),
        (interrupt, 130, ["the state is saved"]),
        (freeze_rank, 3, ["stalled: nothing happened for"]),
        (raylet, 3, ["gone", "died", "failed"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_end_of_any_process_ends_the_run_and_leaves_nothing(
    tmp_path: Path, harm: Callable, code: int, says: list[str], staleness: int
):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    if staleness and harm is not rank:
        pytest.skip("as in turns")
    one = {"processes_per_node": 1, "cpus_per_process": 0.5}
    config = tiny_config(
        tmp_path,
        save_tiny(tmp_path / "model", hidden=128),
        stall_limit=20.0 if harm is freeze_rank else 1800.0,
        placement={
            "type": "ray",
            "pools": {"train": one | {"processes_per_node": 2}, "rollout": one},
            "roles": {"rollout": "rollout"},
        },
        rollout={"max_staleness": staleness},
        train={"steps": 100_000},
        tracking={"trackers": ["console"], "rollouts_every": 0},
    )
    shared = in_shared_memory()
    process, family = start_run(write_config(tmp_path, config)), []
    try:
        wait_for_rows(process, config, 3, 240)
        driver = psutil.Process(process.pid)
        family = driver.children(recursive=True)
        begun = time.monotonic()
        harm(driver, family)
        output = process.communicate(timeout=WITHIN + 100 * (harm is freeze_rank))[
            0
        ]  # it may be asked for the state, too
        assert process.returncode == code, output
        assert not says or any(word in output for word in says), output
        assert "Traceback" not in output, output
        _, left = psutil.wait_procs(family, timeout=max(1.0, begun + WITHIN - time.monotonic()))
        left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not left, [p.cmdline()[:3] for p in left]
        while (files := in_shared_memory() - shared) and time.monotonic() < begun + WITHIN:
            time.sleep(0.5)
        assert not files
        if code != -9:
            last = metrics_of(config)[-1]["step"]
            saved = tmp_path / "runs" / "tiny" / "checkpoints"
            assert harm in (rank, freeze_rank, raylet) or (saved / f"step_{last:06d}" / "manifest.json").is_file(), (
                output
            )
    finally:
        for one_left in [process, *family]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                one_left.kill()
