from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.config.load import build_config
from surefoot.config.tracking import AlarmsConfig
from surefoot.errors import CODES, UserError
from surefoot.tracking import alarms
from surefoot.tracking.alarms import ALARMS, AlarmBell

CONFIG = AlarmsConfig()


def rung(rows: list[dict[str, float]], config: AlarmsConfig = CONFIG) -> list[tuple[int, str]]:
    """Ring through all rows; return (step, code) of what was said, steps counted from 1."""
    bell = AlarmBell(config)
    return [(alarm.step, alarm.code) for step, row in enumerate(rows, start=1) for alarm in bell.ring(step, row)]


def test_every_alarm_is_explained():
    assert set(ALARMS) <= set(CODES)


def test_no_learning_is_said_once_in_plain_words_with_the_key_to_look_at():
    row = {"rollout/truncated": 0.97, "reward/zero_variance_groups": 1.0, "reward/mean": 0.0}
    bell = AlarmBell(CONFIG)
    alarms = [alarm for step in range(1, 8) for alarm in bell.ring(step, row)]
    assert [(alarm.code, alarm.step) for alarm in alarms] == [("alarm-nothing-to-learn", 3)]
    assert "rollout.sampling.max_response_length" in alarms[0].message


def test_equal_rewards_without_truncation_point_at_data_and_reward():
    row = {"rollout/truncated": 0.0, "reward/zero_variance_groups": 1.0, "reward/mean": 0.0}
    (alarm,) = [a for step in (1, 2, 3) for a in AlarmBell(CONFIG, [row] * (step - 1)).ring(step, row)]
    assert "rewards.functions" in alarm.message
    assert "data.sources" in alarm.message
    assert "max_response_length" not in alarm.message


def test_rewards_that_judge_nothing_are_named():
    row = {"rollout/count": 8, "rollout/truncated": 0.0, "reward/unscored": 8}
    bell = AlarmBell(CONFIG)
    alarms = [alarm for step in range(1, 8) for alarm in bell.ring(step, row)]
    assert [(alarm.code, alarm.step) for alarm in alarms] == [("alarm-nothing-to-learn", 3)]
    assert "judged" in alarms[0].message
    assert rung([{**row, "reward/unscored": 7}] * 9) == []


def test_one_group_that_differs_is_enough_to_learn_from():
    assert rung([{"rollout/truncated": 0.9, "reward/zero_variance_groups": 0.98}] * 20) == []


def test_two_barren_steps_in_a_row_are_not_three():
    barren, fertile = {"reward/zero_variance_groups": 1.0}, {"reward/zero_variance_groups": 0.5}
    assert rung([barren, barren, fertile] * 10) == []


def test_a_critic_learns_from_differences_between_groups():
    row = {"critic/loss": 0.1, "reward/zero_variance_groups": 1.0}
    assert rung([row | {"reward/std": 0.5}] * 10) == []
    assert rung([row | {"reward/std": 0.0}] * 10) == [(3, "alarm-nothing-to-learn")]


def test_evaluation_rows_do_not_interrupt_a_series():
    barren = {"reward/zero_variance_groups": 1.0}
    assert rung([barren, barren, {"eval/score": 0.2}, barren]) == [(4, "alarm-nothing-to-learn")]


FIRES = {
    "alarm-nan": ([{"actor/loss": 0.1}, {"actor/loss": math.nan}], 2),
    "alarm-entropy-collapse": ([{"rollout/entropy": v} for v in (0.5, 0.1, 0.009, 0.008, 0.007)], 5),
    "alarm-entropy-explosion": ([{"rollout/entropy": v} for v in (0.5, 0.5, 0.5, 1.0, 1.6, 1.7, 1.8)], 7),
    "alarm-first-ratio": ([{"actor/first_ratio_gap": 0.02}] * 3, 3),
    "alarm-engine-gap": ([{"actor/engine_gap": 0.2}] * 3, 3),
    "alarm-critic": ([{"critic/explained_variance": -0.6}] * 3, 3),
    "alarm-kl": ([{"actor/kl_ref": 11.0}] * 3, 3),
    "alarm-throughput": (
        [{"throughput/tokens_per_second": 1000.0, "time/step": 10.0}] * 6
        + [{"throughput/tokens_per_second": 400.0, "time/step": 25.0}] * 3,
        9,
    ),
    "alarm-length-runaway": (
        [{"rollout/length_mean": 100.0, "eval/score": 0.5}] * 3
        + [{"rollout/length_mean": 250.0, "eval/score": score} for score in (0.45, 0.4, 0.3)],
        6,
    ),
    "alarm-critic-worse": (
        [{"critic/explained_variance": 0.7}] * 9 + [{"critic/explained_variance": 0.1}] * 9,
        18,  # both means are taken over nine steps
    ),
    "alarm-nothing-to-learn": ([{"reward/zero_variance_groups": 1.0}] * 3, 3),
}


@pytest.mark.parametrize("code", ALARMS)
def test_each_alarm_fires_when_it_should_and_once(code: str):
    rows, step = FIRES[code]
    assert rung([*rows, *[rows[-1]] * 5]) == [(step, code)]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(
            [{"rollout/entropy": 0.05}] * 3 + [{"rollout/entropy": 0.3}] * 9, id="a tiny entropy that triples"
        ),
        pytest.param(
            [{"rollout/length_mean": 100.0 * 1.1**i, "eval/score": 0.2 + 0.02 * i} for i in range(30)],
            id="long answers that help",
        ),
        pytest.param(
            [{"rollout/length_mean": 100.0 * 1.1**i} for i in range(30)], id="long answers without held-out data"
        ),
        pytest.param(
            [{"throughput/tokens_per_second": 1000.0 * 0.93**i, "time/step": 10.0 * 0.99**i} for i in range(40)],
            id="fewer tokens since answers got short",
        ),
        pytest.param(
            [{"critic/explained_variance": -3.0, "warmup/actor_trains": 0.0}] * 10
            + [{"critic/explained_variance": 0.5, "warmup/actor_trains": 1.0}] * 10,
            id="a critic in its warm-up",
        ),
        pytest.param(
            [{"critic/explained_variance": 0.8, "reward/std": 0.5}] * 20
            + [{"critic/explained_variance": -0.9, "reward/std": 0.05}] * 20,
            id="a critic of a solved task",
        ),
        pytest.param(
            [{"throughput/tokens_per_second": 1000.0, "time/step": 10.0}] * 9
            + [{"throughput/tokens_per_second": 300.0, "time/step": 30.0, "actor/loss": 0.1}] * 9,
            id="steps that train after steps that do not",
        ),
        pytest.param([{"actor/engine_gap": v} for v in (0.02, 0.3, 0.02, 0.3) * 5], id="single outliers"),
    ],
)
def test_no_alarm(rows: list[dict[str, float]]):
    assert rung(rows) == []


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(50, 300), st.sampled_from([1.0, 2.0]))
def test_a_healthy_run_with_noise_rings_nothing(seed: int, steps: int, growth: float):
    rng = random.Random(seed)
    rows: list[dict[str, float]] = [{"eval/score": 0.2}]
    for step in range(1, steps + 1):
        done = step / steps
        row = {
            "reward/mean": 0.2 + 0.6 * done + rng.gauss(0, 0.08),
            "reward/std": 0.45 + rng.gauss(0, 0.02),
            "reward/zero_variance_groups": min(0.9, max(0.0, 0.3 + 0.4 * done + rng.gauss(0, 0.1))),
            "rollout/truncated": max(0.0, rng.gauss(0.05, 0.05)),
            "rollout/length_mean": 100 * (1 + growth * done) * math.exp(rng.gauss(0, 0.1)),
            "actor/loss": rng.gauss(0, 0.1),
            "actor/grad_norm": math.exp(rng.gauss(0, 1)),
            "rollout/entropy": 0.1 + 0.5 * (1 - done) * math.exp(rng.gauss(0, 0.2)),
            "actor/first_ratio_gap": abs(rng.gauss(0, 1e-4)),
            "actor/engine_gap": abs(rng.gauss(0.01, 0.01)),
            "actor/kl_ref": abs(rng.gauss(0.1 * done, 0.05)),
            "critic/loss": abs(rng.gauss(0.1, 0.05)),
            "critic/explained_variance": 0.6 * min(1.0, 4 * done) + rng.gauss(0, 0.1),
            "throughput/tokens_per_second": 1000 * math.exp(rng.gauss(0, 0.15)),
            "time/step": 30 * math.exp(rng.gauss(0, 0.15)),
        }
        if step % 10 == 0:
            row["eval/score"] = 0.2 + 0.6 * done + rng.gauss(0, 0.02)
        rows.append(row)
    assert rung(rows) == []


@pytest.mark.parametrize("name", ["actor/loss", "actor/grad_norm", "critic/loss", "reward/mean"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_vital_number_that_is_none_is_announced_at_once_by_name(name: str, value: float):
    (alarm,) = AlarmBell(CONFIG).ring(1, {name: value})
    assert alarm.code == "alarm-nan"
    assert name in alarm.message


def test_what_was_said_before_a_resume_is_not_said_again():
    row = {"actor/kl_ref": 50.0}
    assert AlarmBell(CONFIG, [row] * 5, said=["alarm-kl"]).ring(6, row) == []
    assert [a.code for a in AlarmBell(CONFIG, [row] * 5).ring(6, row)] == ["alarm-kl"]


def test_thresholds_come_from_the_configuration():
    row = {"actor/kl_ref": 3.0}
    assert rung([row] * 9) == []
    assert rung([row] * 9, AlarmsConfig(kl_limit=2.0, window=5)) == [(5, "alarm-kl")]


def test_only_named_alarms_end_the_run():
    bell = AlarmBell(AlarmsConfig(stop_on=["alarm-kl"], window=1))
    kl, nan = (bell.ring(1, row)[0] for row in ({"actor/kl_ref": 50.0}, {"actor/loss": math.nan}))
    assert bell.ends_run(kl)
    assert not bell.ends_run(nan)


def test_a_misspelt_alarm_is_refused_with_the_nearest_one_before_anything_loads():
    values = {
        "model": {"path": "m"},
        "data": {"sources": [{"type": "file", "path": "x.jsonl"}]},
        "rewards": {"functions": [{"type": "exact"}]},
        "train": {"steps": 1},
        "alarms": {"stop_on": ["alarm-nans"]},
    }
    with pytest.raises(UserError, match="did you mean `alarm-nan`"):
        build_config(values)


def test_looking_costs_the_same_at_every_step_and_the_start_is_remembered(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []

    def count(rows: alarms.Rows, config: AlarmsConfig) -> None:
        seen.append(len(rows))

    monkeypatch.setitem(alarms.ALARMS, "alarm-kl", count)
    monkeypatch.setattr(alarms, "_NEWEST", 100)
    config = AlarmsConfig(window=3)
    bell = AlarmBell(config)
    said: list[str] = []
    for step in range(1, 2001):
        entropy = 1.0 if step < 1900 else 9.0
        said += [alarm.code for alarm in bell.ring(step, {"step": step, "rollout/entropy": entropy})]
    assert max(seen) <= 120
    assert said == ["alarm-entropy-explosion"]  # against the start of the run, 1,900 steps ago
