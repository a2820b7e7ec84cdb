from __future__ import annotations

import pytest

from surefoot.records import Metric, Reward
from surefoot.tracking.clock import PhaseClock
from surefoot.tracking.metrics import flatten, rollout_metrics
from tests.tracking.helpers import make_rollout


def test_rewards_and_their_spread_by_hand():
    rollouts = [
        make_rollout("a", 0, reward=Reward(1.0, {"exact": 1.0, "format": 1.0})),
        make_rollout("a", 1, reward=Reward(1.0, {"exact": 1.0, "format": None})),
        make_rollout("b", 0, reward=Reward(0.0, {"exact": 0.0, "format": 0.5})),
        make_rollout("b", 1, reward=Reward(2.0, {"exact": 2.0})),
    ]
    numbers = flatten(rollout_metrics(rollouts))
    assert numbers["reward/mean"] == 1.0
    assert numbers["reward/std"] == pytest.approx(0.5**0.5)
    assert numbers["reward/zero_variance_groups"] == 0.5
    assert numbers["reward/part/exact"] == 1.0
    assert numbers["reward/part/format"] == 0.75
    assert (numbers["reward/min"], numbers["reward/max"]) == (0.0, 2.0)


def test_rows_without_a_score_do_not_enter_the_mean_and_are_counted():
    rewards = [Reward(1.0), Reward(0.0), Reward(None, error="timed out"), Reward(1.0)]
    numbers = flatten(rollout_metrics([make_rollout("a", i, reward=r) for i, r in enumerate(rewards)]))
    assert numbers["reward/mean"] == pytest.approx(2 / 3)
    assert numbers["reward/unscored"] == 1
    assert numbers["reward/errors"] == 1


def test_no_metric_is_nan_when_nothing_was_scored():
    numbers = flatten(rollout_metrics([make_rollout(reward=Reward(None)), make_rollout("b")]))
    assert "reward/mean" not in numbers
    assert all(value == value for value in numbers.values())


def test_a_group_of_one_has_no_variance_to_speak_of():
    numbers = flatten(rollout_metrics([make_rollout("a", reward=Reward(1.0)), make_rollout("b", reward=Reward(1.0))]))
    assert "reward/zero_variance_groups" not in numbers


def test_truncation_is_exactly_zero_when_nothing_was_cut_however_uneven_the_lengths():
    rollouts = [make_rollout("a", i, model_tokens=length) for i, length in enumerate([1, 7, 300])]
    numbers = flatten(rollout_metrics(rollouts))
    assert numbers["rollout/truncated"] == 0.0
    assert numbers["rollout/length_max"] == 300


def test_truncation_counts_those_that_hit_the_limit_and_no_others():
    reasons = ["length", "stop", "tool_limit", "aborted"]
    numbers = flatten(rollout_metrics([make_rollout("a", i, finish_reason=r) for i, r in enumerate(reasons)]))
    assert numbers["rollout/truncated"] == 0.25
    assert numbers["rollout/aborted"] == 0.25


def test_flatten_leaves_out_means_over_nothing():
    assert flatten({"a": Metric(float("nan"), weight=0), "b": Metric(2.0, weight=3)}) == {"b": 2.0}


def test_phases_add_up_to_the_step_and_the_rest_is_named():
    times = iter([0.0, 1.0, 4.0, 5.0, 5.5, 10.0, 10.0, 12.0])
    clock = PhaseClock(now=lambda: next(times))
    with clock.phase("generate"):
        pass
    with clock.phase("update"):
        pass
    assert clock.lap() == {"time/generate": 3.0, "time/update": 0.5, "time/other": 6.5, "time/step": 10.0}
    with clock.phase("generate"):
        pass


def test_a_phase_inside_another_is_not_counted_twice():
    times = iter([0.0, 1.0, 2.0, 3.0, 9.0, 10.0])
    clock = PhaseClock(now=lambda: next(times))
    with clock.phase("evaluate"), clock.phase("generate"):
        pass
    lap = clock.lap()
    assert lap["time/other"] + lap["time/evaluate"] == lap["time/step"]
    assert "time/generate" not in lap
