"""Several rewards together: sums, abstentions, errors, async functions, scoring while rows still come."""

from __future__ import annotations

import asyncio
import bdb
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.config.rewards import ExactReward
from surefoot.records import Reward, merge_metrics
from surefoot.rewards.api import Outcome
from surefoot.rewards.loop import LoopBlocked, LoopThread
from surefoot.rewards.runner import Part, RewardRunner, combine
from surefoot.tracking.metrics import rollout_metrics
from tests.rewards.helpers import config, python, rewards_of, rollout, score, scores


def part(name: str, weight: float) -> Part:
    async def judge(items):
        return []

    return Part(name, ExactReward(type="exact", name=name, weight=weight), False, judge)


TWO = [part("a", 1.0), part("b", 0.5)]


@pytest.mark.parametrize(
    ("a", "b", "score", "parts"),
    [
        (Outcome(1.0), Outcome(4.0), 3.0, {"a": 1.0, "b": 4.0}),
        (Outcome(1.0), Outcome(), 1.0, {"a": 1.0, "b": None}),
        (Outcome(), Outcome(4.0), 2.0, {"a": None, "b": 4.0}),
        (Outcome(), Outcome(), None, {"a": None, "b": None}),
        (Outcome(1.0), Outcome(error="broken"), None, {"a": 1.0, "b": None}),
        (Outcome(0.0), Outcome(0.0, {"acc": 1.0}), 0.0, {"a": 0.0, "b": 0.0, "b/acc": 1.0}),
        (Outcome(1.5e308), Outcome(1.5e308), None, {"a": 1.5e308, "b": 1.5e308}),
    ],
)
def test_the_score_is_the_weighted_sum_of_the_parts_that_speak(a, b, score, parts):
    reward = combine(TWO, [a, b], row=7)
    assert (reward.score, reward.parts) == (score, parts)
    assert (reward.error is None) == (a.error is b.error is None and 1.5e308 not in parts.values())


def test_an_error_is_kept_with_name_and_row():
    assert combine(TWO, [Outcome(1.0), Outcome(error="broken")], row=7).error == "b (row 7): broken"
    both = combine(TWO, [Outcome(error="x"), Outcome(error="y")], row=0)
    assert both.error == "a (row 0): x; b (row 0): y"


def test_a_part_of_weight_0_is_logged_and_never_decides():
    logged = [part("a", 1.0), part("seen", 0.0)]
    assert combine(logged, [Outcome(2.0), Outcome(5.0)], 0).score == 2.0
    assert combine(logged, [Outcome(2.0), Outcome(5.0)], 0).parts == {"a": 2.0, "seen": 5.0}
    failed = combine(logged, [Outcome(2.0), Outcome(error="broken")], 0)
    assert (failed.score, failed.error) == (2.0, "seen (row 0): broken")
    assert combine(logged, [Outcome(), Outcome(5.0)], 0).score is None


@given(st.lists(st.tuples(st.floats(-10, 10), st.one_of(st.none(), st.floats(-1e6, 1e6))), min_size=1, max_size=5))
def test_a_score_is_finite_or_none(weighted):
    parts = [part(str(i), weight) for i, (weight, _) in enumerate(weighted)]
    reward = combine(parts, [Outcome(value) for _, value in weighted], 0)
    speaking = [w * v for w, v in weighted if v is not None and w != 0]
    assert reward.score == (pytest.approx(math.fsum(speaking), abs=1e-6) if speaking else None)


def test_rewards_active_on_different_rows_have_finite_means_of_their_own_rows():
    functions = (python("even_rows_only", name="even"), python("odd_rows_only", name="odd", weight=2.0))
    steps = []
    with RewardRunner(config(*functions)) as runner:
        for step in range(
            4
        ):  # Steps 0 and 2 hold even rows only, 1 and 3 odd ones: each part sleeps through half of them.
            steps.append(
                rollout_metrics(asyncio.run(runner.score([rollout(index=2 * i + step % 2) for i in range(3)])))
            )
    assert "reward/part/odd" not in steps[0]
    merged = merge_metrics(steps)
    assert merged["reward/part/even"].value == 1.0
    assert merged["reward/part/odd"].value == 3.0
    assert merged["reward/mean"].value == pytest.approx((1.0 + 6.0) / 2)
    assert all(math.isfinite(m.value) for m in merged.values())


def test_a_row_that_no_reward_judges_is_counted_and_left_out():
    scored = score(config(python("even_rows_only")), [rollout(index=i) for i in (0, 1, 2, 3)])
    assert scores(scored) == [1.0, None, 1.0, None]
    metrics = rollout_metrics(scored)
    assert metrics["reward/unscored"].value == 2
    assert metrics["reward/errors"].value == 0
    assert metrics["reward/mean"].value == 1.0


def test_a_reward_may_be_for_some_sources_only():
    functions = (
        {"type": "exact", "sources": ["facts"]},
        python("batch_async", batch=True, sources=["numbers"], name="index"),
        {"type": "length", "limit": 4, "buffer": 4},
    )
    rows = [rollout("x", "x", source="facts"), rollout(source="numbers", index=7), rollout("x", "x", source="other")]
    first, second, third = rewards_of(score(config(*functions), rows))
    assert first.parts == {"exact": 1.0, "index": None, "length": -1.0}
    assert second.parts == {"exact": None, "index": 7.0, "length": -1.0}
    assert third.parts == {"exact": None, "index": None, "length": -1.0}
    assert [first.score, second.score, third.score] == [0.0, 6.0, -1.0]


def test_a_batch_reward_without_any_row_of_its_own_is_not_called():
    functions = (python("batch_result", batch=True, sources=["none"]), {"type": "exact"})
    assert scores(score(config(*functions), [rollout("x", "x")])) == [1.0]
    assert score(config(*functions), []) == []


def test_functions_get_their_params_and_keep_the_row_order():
    rows = [rollout("x" * i, index=i) for i in range(5)]
    scored = score(config(python("half", params={"factor": 2}), python("length", name="plain")), rows)
    assert scores(scored) == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert [r.sample_index for r in scored] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [0, 1])
def test_async_functions_run_at_once(workers):
    started = time.monotonic()
    assert scores(score(config(python("slow_async"), workers=workers), [rollout()] * 20)) == [1.0] * 20
    assert time.monotonic() - started < 3  # One by one it would be 6 s.


def test_async_functions_run_no_more_at_once_than_allowed():
    started = time.monotonic()
    score(config(python("slow_async", concurrency=2), workers=1), [rollout()] * 6)
    assert time.monotonic() - started >= 0.9


def test_an_async_call_that_never_answers_costs_its_own_row():
    rows = [rollout("hang" if i == 1 else "ok") for i in range(4)]
    started = time.monotonic()
    found = rewards_of(score(config(python("hanging_async"), workers=1, timeout_seconds=0.5), rows))
    assert [r.score for r in found] == [1.0, None, 1.0, 1.0]
    assert "(row 1): no answer within 0.5 s" in str(found[1].error)
    assert time.monotonic() - started < 3


def test_an_async_function_that_raises_costs_its_own_row():
    (found,) = rewards_of(score(config(python("failing_async"), workers=1), [rollout()]))
    assert "TimeoutError" in str(found.error)


def test_an_event_loop_that_is_blocked_is_left_and_a_new_one_taken():
    async def block() -> None:
        time.sleep(1.5)

    async def answer() -> int:
        return 42

    async def use() -> int:
        loop = LoopThread(patience=0.5)
        with pytest.raises(LoopBlocked):
            await loop.run(block)
        found = await loop.run(answer)
        loop.close()
        return found

    started = time.monotonic()
    assert asyncio.run(use()) == 42
    assert time.monotonic() - started < 1.4


def test_scoring_starts_while_rows_still_come_and_keeps_their_order():
    async def run() -> tuple[list[Reward], float]:
        index = python("batch_async", batch=True, name="index")
        with RewardRunner(config(python("called_at", name="at"), index, workers=1)) as runner:
            await runner.score([rollout()])  # The worker is up now.
            step = runner.begin()
            for i in range(3):
                step.add(rollout(index=i))
            await asyncio.sleep(0.5)
            finished = time.time()
            step.add(rollout(index=3))
            return rewards_of(await step.finish()), finished

    found, finished = asyncio.run(run())
    assert [r.parts["index"] for r in found] == [0.0, 1.0, 2.0, 3.0]
    assert [(r.parts["at"] or 0) < finished for r in found] == [True, True, True, False]


def test_without_workers_a_breakpoint_stops_in_the_function(monkeypatch: pytest.MonkeyPatch):
    import os
    import sys

    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append((os.getpid(), sys._getframe(1).f_code.co_name)))
    assert scores(score(config(python("take_breakpoint"), workers=0), [rollout()])) == [1.0]
    assert stops == [(os.getpid(), "take_breakpoint")]

    def quit_debugger() -> None:
        raise bdb.BdbQuit

    monkeypatch.setattr(sys, "breakpointhook", quit_debugger)
    with pytest.raises(bdb.BdbQuit):
        score(config(python("take_breakpoint"), workers=0), [rollout()])


def test_seconds_are_reported_for_each_reward_and_start_again():
    with RewardRunner(config(python("slow_async", name="slow"), {"type": "exact"})) as runner:
        asyncio.run(runner.score([rollout("x", "x")] * 3))
        metrics = runner.metrics()
        assert metrics["reward/seconds/slow"].value == pytest.approx(0.9, abs=0.4)
        assert metrics["reward/seconds/exact"].value < 0.1
        assert all(m.kind == "sum" and math.isfinite(m.value) for m in metrics.values())
        assert "reward/seconds/slow" not in runner.metrics()
