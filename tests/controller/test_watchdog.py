"""The watchdog: it barks when nothing happens, only then, and what it ends has its state saved."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from surefoot.controller import watchdog
from surefoot.controller.run import run_training
from surefoot.controller.signals import Interrupted, StopSignal
from surefoot.controller.watchdog import Watchdog, own_stacks, stack_of
from surefoot.errors import RunError

from .tiny_run import metrics_of, tiny_config


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, said: list[str]) -> tuple[Watchdog, StopSignal]:
    stop = StopSignal()
    return Watchdog(100.0, stop, said.append, clock), stop


def test_it_barks_after_the_limit_once_and_names_phase_and_report(clock: Clock):
    said: list[str] = []
    dog, stop = make(clock, said)
    dog.report = lambda: ["sampler-0 has not answered 2 requests: a, b", ""]
    dog.beat("generate")
    clock.time = 99
    assert not dog.look()
    dog.check()
    clock.time = 100
    assert dog.look()
    assert said == [
        "stalled: nothing happened for 100 s in phase 'generate'\n    sampler-0 has not answered 2 requests: a, b"
    ]
    with pytest.raises(RunError, match="nothing happened for 100 s in phase 'generate'") as caught:
        dog.check()
    assert caught.value.code == "stalled"
    dog.check()  # once: what saves the state may wait again
    clock.time = 199
    assert not dog.look()
    assert not stop.failing


def test_anything_that_happens_resets_it(clock: Clock):
    said: list[str] = []
    dog, _ = make(clock, said)
    for _ in range(10):
        clock.time += 90
        assert not dog.look()
        dog.beat()
    for count in range(20):  # the processes get on, though nobody says so
        clock.time += 45
        dog.counters = lambda: {"rank": count, "idle": 7}  # noqa: B023
        assert not dog.look()
    clock.time += 60
    dog.look()
    assert said == []
    clock.time += 100
    assert dog.look()  # and now they do not


def test_a_report_that_fails_is_no_reason_to_hang(clock: Clock):
    said: list[str] = []
    dog, stop = make(clock, said)
    dog.report = lambda: 1 / 0  # type: ignore[assignment]
    clock.time = 100
    assert dog.look()
    assert "nobody could be asked: division by zero" in said[0]
    assert stop.failing


def test_it_says_where_other_threads_are():
    ready, done = threading.Event(), threading.Event()

    def waits_for_the_test() -> None:
        ready.set()
        done.wait()

    thread = threading.Thread(target=waits_for_the_test, name="stuck")
    thread.start()
    ready.wait()
    try:
        (line,) = [line for line in own_stacks().splitlines() if line.startswith("stuck")]
        assert "waits_for_the_test (test_watchdog.py:" in line
    finally:
        done.set()
        thread.join()


def test_a_failure_interrupts_what_a_signal_does_not():
    async def work() -> None:
        stop = StopSignal()
        stop.defer()
        stop.requested = True
        stop._signalled.set()
        assert await stop.unless_failed(asyncio.sleep(0.05, "done")) == "done"
        stop.requested = False
        with pytest.raises(Interrupted):
            await stop.unless_requested(asyncio.sleep(5))
        asyncio.get_running_loop().call_later(0.05, stop.fail, RunError("stalled", "too long"))
        begun = time.monotonic()
        with pytest.raises(RunError, match="too long"):
            await stop.unless_failed(asyncio.sleep(5))
        assert time.monotonic() - begun < 2

    asyncio.run(work())


def test_py_spy_tells_of_other_processes(monkeypatch: pytest.MonkeyPatch):
    if shutil.which("py-spy") is None:
        monkeypatch.setenv("PATH", "")
        assert stack_of(os.getpid()) is None
        return
    other = subprocess.Popen([sys.executable, "-c", "import time\nprint(1, flush=True)\ntime.sleep(60)"], stdout=-1)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        assert "<module> (<string>:3)" in (stack_of(other.pid) or "")
        assert stack_of(2**22 - 1) is None
    finally:
        other.kill()
        other.wait()


PROGRAM = """
import asyncio
from surefoot.rollout.single_turn import single_turn

calls = 0

async def hangs(prompt, engine, context):
    global calls
    calls += 1
    if calls > {after}:
        {wait}
    return await single_turn(prompt, engine, context)
"""


def test_a_slow_step_is_no_stall(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A step longer than the limit, in which micro-batches and tokens are computed all the time."""
    from surefoot.train.engine import ModuleEngine

    forward = ModuleEngine._forward

    def slow(self, *arguments):
        time.sleep(0.25)
        return forward(self, *arguments)

    monkeypatch.setattr(ModuleEngine, "_forward", slow)
    train = {"steps": 1, "max_tokens_per_microbatch": 80, "share_prefixes": False}
    config = tiny_config(tmp_path, tiny_folder, stall_limit=1.0, train=train)
    run_training(config)
    assert metrics_of(config)[0]["time/update"] > 1.5


def test_a_rollout_program_that_waits_for_ever_ends_the_run_with_its_state(tmp_path: Path, tiny_folder: Path):
    (tmp_path / "program.py").write_text(PROGRAM.format(after=9, wait="await asyncio.Event().wait()"))
    config = tiny_config(
        tmp_path, tiny_folder, stall_limit=3.0, rollout={"program": f"{tmp_path / 'program.py'}:hangs"}
    )
    begun = time.monotonic()
    with pytest.raises(RunError, match="in phase 'generate'") as caught:
        run_training(config)
    assert caught.value.code == "stalled"
    assert time.monotonic() - begun < 30
    assert [row["step"] for row in metrics_of(config)] == [1, 2]
    state = tmp_path / "runs" / "tiny" / "checkpoints" / "step_000002" / "manifest.json"
    assert json.loads(state.read_text())["step"] == 2


def test_a_process_that_does_not_even_end_is_ended_with_its_stack(tmp_path: Path, tiny_folder: Path):
    (tmp_path / "program.py").write_text(PROGRAM.format(after=5, wait="__import__('time').sleep(600)"))
    config = tiny_config(
        tmp_path, tiny_folder, stall_limit=2.0, rollout={"program": f"{tmp_path / 'program.py'}:hangs"}
    )
    (tmp_path / "run.json").write_text(config.model_dump_json())
    script = f"""
import json
from surefoot.config.load import build_config
from surefoot.controller import run, watchdog
watchdog.GRACE = 1.0
run.run_training(build_config(json.load(open({str(tmp_path / "run.json")!r}))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "it does not end by itself either" in done.stderr
    assert "MainThread: hangs (program.py:" in done.stderr
    assert watchdog.GRACE == 60.0
