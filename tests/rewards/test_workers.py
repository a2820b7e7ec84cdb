"""What reward functions do to their processes, and what is left of it: one row with an error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from surefoot.errors import RunError
from surefoot.rewards import pool
from surefoot.rewards.runner import RewardRunner
from tests.rewards.helpers import FUNCTIONS, config, python, rewards_of, rollout, score, scores

BY_INSTRUCTION = python("by_instruction", name="mine")


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_call_that_spins_in_c_is_killed_and_costs_its_own_row():
    before = children()
    timeout = 2.0
    with RewardRunner(config(BY_INSTRUCTION, workers=1, timeout_seconds=timeout)) as runner:
        asyncio.run(runner.score([rollout("warm")]))
        rows = [rollout("spin" if i == 3 else "ok", index=i) for i in range(8)]
        started = time.monotonic()
        found = rewards_of(asyncio.run(runner.score(rows)))
        elapsed = time.monotonic() - started
        assert [r.score for r in found] == [1.0, 1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0]
        assert "mine (row 3): no answer within 2 s" in str(found[3].error)
        assert elapsed < timeout + 1.5
        metrics = runner.metrics()
        assert metrics["reward/workers_lost"].value == 1
        assert metrics["reward/seconds/mine"].value >= timeout
        assert runner.metrics()["reward/workers_lost"].value == 0

        started = time.monotonic()
        assert scores(asyncio.run(runner.score([rollout("ok")] * 8))) == [1.0] * 8
        assert time.monotonic() - started < timeout
    assert children() == before


def test_calls_that_crash_cost_their_own_rows():
    said = {
        "segfault": "its worker died by SIGSEGV and was replaced",
        "exit": "its worker left with exit code 3 and was replaced",
        "sysexit": "SystemExit: enough",
        "raise": "KeyError: 'nothing here'",
    }
    rows = [rollout(text) for instruction in said for text in (instruction, "ok")]
    found = rewards_of(score(config(BY_INSTRUCTION, workers=1), rows))
    assert [r.score for r in found] == [None, 1.0] * 4
    for index, text in enumerate(said.values()):
        assert str(found[2 * index].error).startswith(f"mine (row {2 * index}): {text}")


def test_what_a_killed_call_has_started_is_killed_too():
    mark = f"mark-{os.getpid()}-{time.time()}"
    found = rewards_of(score(config(BY_INSTRUCTION, workers=1, timeout_seconds=1.5), [rollout("child", mark)]))
    assert found[0].error is not None
    assert wait_for(
        lambda: not any(mark in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
    )


def test_rows_keep_their_order_over_several_workers():
    rows = [rollout(f"sleep {0.2 if i % 4 == 0 else 0}", index=i) for i in range(12)]
    rewards = config(BY_INSTRUCTION, python("batch_async", batch=True, name="index"), workers=2)
    scored = score(rewards, rows)
    assert [r.sample_index for r in scored] == list(range(12))
    assert scores(scored) == [1.0 + i for i in range(12)]


def test_a_worker_is_replaced_before_a_leak_fills_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "GROWTH_BYTES", 100 << 20)
    with RewardRunner(config(BY_INSTRUCTION, workers=1)) as runner:
        rows = [rollout("leak"), rollout("pid")] * 20  # 20 MiB each: 400 MiB in all.
        found = scores(asyncio.run(runner.score(rows)))
        used = {pid for pid in found if pid != 1.0}
        assert 4 <= len(used) <= 10
        assert sum(psutil.Process(pid).memory_info().rss for pid in children()) < 600 << 20
        assert runner.metrics()["reward/workers_lost"].value == 0


def test_a_worker_is_replaced_after_its_share_of_tasks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "TASKS_PER_WORKER", 3)
    found = scores(score(config(BY_INSTRUCTION, workers=1), [rollout("pid")] * 7))
    assert [found.count(pid) for pid in dict.fromkeys(found)] == [3, 3, 1]


def test_starting_does_not_wait_for_the_workers():
    runner = RewardRunner(config(BY_INSTRUCTION, workers=1))
    started = time.monotonic()
    runner.start()
    assert time.monotonic() - started < 0.2
    runner.close()


def test_workers_load_no_torch():
    assert "torch" in sys.modules
    assert scores(score(config(BY_INSTRUCTION, workers=1), [rollout("torch")])) == [0.0]


def test_what_a_function_prints_is_seen(capfd: pytest.CaptureFixture[str]):
    score(config(BY_INSTRUCTION, workers=1), [rollout("print", "this one")])
    assert "seen this one" in capfd.readouterr().out


def test_closing_in_the_middle_of_a_call_leaves_no_child_and_no_wait():
    before = children()

    async def interrupted() -> float:
        runner = RewardRunner(config(BY_INSTRUCTION, workers=2, timeout_seconds=60))
        runner.start()
        step = runner.begin()
        for _ in range(6):
            step.add(rollout("spin"))
        finishing = asyncio.ensure_future(step.finish())
        await asyncio.sleep(2)
        started = time.monotonic()
        runner.close()
        runner.close()
        with pytest.raises(RunError, match="closed"):
            await finishing
        return time.monotonic() - started

    assert asyncio.run(interrupted()) < 2
    assert children() == before


def test_a_step_that_is_cancelled_does_no_harm_to_the_next():
    async def cancelled_then_used() -> list[float | None]:
        with RewardRunner(config(BY_INSTRUCTION, workers=1)) as runner:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(runner.score([rollout("sleep 1"), rollout("sleep 1")]), 0.7)
            return scores(await runner.score([rollout("ok"), rollout("ok")]))

    assert asyncio.run(cancelled_then_used()) == [1.0, 1.0]


DRIVER = f"""
import asyncio, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background leaves it ignored
from surefoot.rewards.runner import RewardRunner
from tests.rewards.helpers import config, python, rollout
runner = RewardRunner(config({BY_INSTRUCTION!r}, {{"type": "regex", "pattern": "x"}}, workers=2, timeout_seconds=600))
runner.start()
async def go():
    await runner.score([rollout("ok")] * 4)
    step = runner.begin()
    step.add(rollout("spin")); step.add(rollout("ok"))
    await asyncio.sleep(0.5)
    print("ready", flush=True)
    await step.finish()
asyncio.run(go())
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_controller_however_it_ends(end: signal.Signals):
    controller = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert controller.stdout is not None
    assert controller.stdout.readline() == "ready\n"
    workers = psutil.Process(controller.pid).children(recursive=True)
    assert len(workers) == 4
    controller.send_signal(end)
    assert controller.wait(20) != 0
    assert wait_for(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers))
    controller.stdout.close()


def test_a_function_that_only_a_fresh_process_cannot_load_ends_the_run_with_its_reason(tmp_path: Path):
    file = tmp_path / "picky.py"
    file.write_text("import sys\nassert 'pytest' in sys.modules, 'only under pytest'\ndef f(item): return 1.0\n")
    rewards = config({"type": "python", "function": f"{file}:f"}, workers=1)
    with RewardRunner(rewards) as runner, pytest.raises(RunError, match="only under pytest") as caught:
        asyncio.run(runner.score([rollout("x")]))
    assert caught.value.code == "reward-worker"


def test_an_item_that_cannot_be_sent_or_read_costs_its_own_row():
    class Local:
        pass

    rows = [rollout(extra={"result": Local()}), rollout(extra={"result": 2.0}), rollout(extra={"result": lambda: 0})]
    found = rewards_of(score(config(python("return_extra"), workers=1), rows))
    assert [r.score for r in found] == [None, 2.0, None]
    assert "cannot be sent" in str(found[0].error)


def test_text_that_verifiers_evaluate_can_do_nothing(tmp_path: Path):
    # Several verifiers hand the model's text to `eval`; here one would create a file and one would run a program.
    entry = {"answer": "1 2", "metadata": {"source_dataset": "spiral_matrix"}}
    target = tmp_path / "made by the model"
    attacks = [
        f"[open({str(target)!r}, 'w')]",
        f"[__import__('os').system('touch {target}')]",
        "[__import__('os').kill(__import__('os').getppid(), 9)]",
    ]
    rows = [rollout(text, extra={"reasoning_gym": entry}) for text in [*attacks, "1 2", "[1, 2]"]]
    spec = {"type": "reasoning_gym"}
    assert scores(score(config(spec, workers=1, timeout_seconds=30), rows)) == [0.0, 0.0, 0.0, 1.0, 0.1]
    assert not target.exists()
    score(config(spec, workers=0), rows[:1])  # In the controller it is not locked down: that attack works.
    assert target.exists()


def test_a_number_too_large_to_compute_costs_its_own_row():
    entry = {"answer": "1 + 1", "metadata": {"source_dataset": "puzzle24", "numbers": [1, 1, 1, 1]}}
    rows = [rollout(text, extra={"reasoning_gym": entry}) for text in ["9**9**9**9", "6*4*1*1"]]
    found = rewards_of(score(config({"type": "reasoning_gym"}, workers=1, timeout_seconds=2), rows))
    assert found[0].score in (None, 0.01)
    assert found[1].score == 1.0


def test_user_functions_may_use_processes_and_files_in_their_worker(tmp_path: Path):
    assert FUNCTIONS.exists()
    rewards = config({"type": "code"}, {"type": "exact", "weight": 0}, workers=1)
    answer = json.dumps(["f() == 3"])
    (found,) = rewards_of(score(rewards, [rollout("```python\ndef f(): return 3\n```", answer)]))
    assert found.parts == {"code": 1.0, "exact": 0.0}
