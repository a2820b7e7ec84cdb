"""Alarms: what goes wrong silently in this kind of training, said once and at once.

Each alarm is a pure function of the run's rows so far (one dict of metrics a step, newest last) and the thresholds;
it returns a sentence, or None. A metric that a run does not have keeps its alarms silent: "steps in a row" are rows
that carry the metric.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import TypeAlias

from ..config.tracking import AlarmsConfig
from .api import Alarm, Row

Rows: TypeAlias = Sequence[Row]
Check: TypeAlias = Callable[[Rows, AlarmsConfig], str | None]

# Weights are spoilt for good when one of these is not a number.
_VITAL = (
    "actor/loss",
    "actor/grad_norm",
    "rollout/entropy",
    "actor/kl_ref",
    "critic/loss",
    "critic/grad_norm",
    "reward/mean",
)
# Multiples of a tiny entropy are noise: growth must also be this many nats per token.
_MIN_ENTROPY_RISE = 0.5
# Held-out scores wobble; "falls" means two evaluations in a row this share below the best.
_HELD_OUT_FALL = 0.1
# Where returns hardly vary any more (the task is nearly solved) the explained variance says nothing.
_MIN_SPREAD = 0.25
# Means for "clearly worse" are taken over this many windows, since a critic's explained variance is noisy.
_LONG_WINDOWS = 3
# Alarms see the beginning of the run and so many of its newest rows: looking costs the same at every step.
_NEWEST = 1000


def nothing_to_learn(rows: Rows, config: AlarmsConfig) -> str | None:
    """Every advantage is zero, or nearly every response is cut, for `window` steps."""
    cut = _last(rows, "rollout/truncated", config.window)
    if _all(cut, lambda share: share >= config.truncated_fraction):
        return (
            f"for {config.window} steps at least {min(cut):.0%} of the responses were cut at the length limit, so "
            "hardly any can earn its reward. Raise rollout.sampling.max_response_length, or ask for shorter answers "
            "(data.sources.*.system_prompt)."
        )
    unjudged = [r.get("reward/unscored") == r["rollout/count"] for r in rows[-config.window :] if "rollout/count" in r]
    if len(unjudged) == config.window and all(unjudged):
        return (
            f"for {config.window} steps not one response was judged: every reward failed or abstained, so no weight "
            "moves. The errors stand in the rollout files; look at rewards.functions."
        )
    # A critic is a baseline of its own: it can learn from the difference between groups.
    name = "reward/std" if any("critic/loss" in row for row in rows) else "reward/zero_variance_groups"
    spread = _last(rows, name, config.window)
    equal = (lambda v: v == 0) if name == "reward/std" else (lambda v: v >= config.zero_variance_fraction)
    if not _all(spread, equal):
        return None
    rewards = _last(rows, "reward/mean", config.window)
    level = f" (mean reward {fmean(rewards):.3g})" if rewards else ""
    return (
        f"for {config.window} steps the rewards within each group were all equal{level}: every advantage is zero and "
        "no weight moves. If no sample earns anything the data is too hard, or rewards.functions does not recognise "
        "right answers; if all do, it is too easy (data.sources). More train.samples_per_prompt also help."
    )


def not_a_number(rows: Rows, config: AlarmsConfig) -> str | None:
    """A vital number of the newest step is NaN or infinite."""
    del config
    bad = [f"{name} = {rows[-1][name]}" for name in _VITAL if not math.isfinite(rows[-1].get(name, 0.0))]
    if not bad:
        return None
    advice = "Go on from the last checkpoint with a lower train.optimizer.learning_rate or model.dtype=float32."
    return f"{', '.join(bad)}. {advice}"


def entropy_collapse(rows: Rows, config: AlarmsConfig) -> str | None:
    """Entropy below the floor for `window` steps."""
    recent = _last(rows, "rollout/entropy", config.window)
    if not _all(recent, lambda nats: nats < config.entropy_floor):
        return None
    return (
        f"the policy's entropy is {recent[-1]:.2g} nats per token: all samples of a prompt are nearly the same. If "
        "the reward is not where you want it, lower train.optimizer.learning_rate or raise algorithm.entropy_coef."
    )


def entropy_explosion(rows: Rows, config: AlarmsConfig) -> str | None:
    """Entropy over a multiple of its start for `window` steps."""
    start, recent = _start_and_last(rows, "rollout/entropy", config.window)
    if start is None or not _all(recent, lambda v: v > max(config.entropy_growth * start, start + _MIN_ENTROPY_RISE)):
        return None
    return (
        f"the policy's entropy rose from {start:.2g} to {fmean(recent):.2g} nats per token: it drifts to noise. Lower "
        "train.optimizer.learning_rate, set algorithm.entropy_coef to 0, or use algorithm.kl."
    )


def first_ratio(rows: Rows, config: AlarmsConfig) -> str | None:
    """The ratio at a step's first update is not 1."""
    recent = _last(rows, "actor/first_ratio_gap", config.window)
    if not _all(recent, lambda gap: gap > config.first_ratio_gap):
        return None
    return (
        f"at the first update of a step the ratio differs from 1 by {recent[-1]:.2g} on average, and it should not "
        "differ: look at model.lora.dropout (must be 0) and model.dtype (float32 to compare)."
    )


def engine_gap(rows: Rows, config: AlarmsConfig) -> str | None:
    """Engine and trainer disagree about the sampled tokens."""
    recent = _last(rows, "actor/engine_gap", config.window)
    if not _all(recent, lambda gap: gap > config.engine_gap):
        return None
    return (
        f"engine and trainer differ by {recent[-1]:.2g} nats per sampled token: the engine may run other weights than "
        "the trained ones, or another temperature or arithmetic. Compare with model.dtype=float32; "
        "algorithm.importance_cap bounds the harm."
    )


def length_runaway(rows: Rows, config: AlarmsConfig) -> str | None:
    """Responses grow while the held-out score falls."""
    start, recent = _start_and_last(rows, "rollout/length_mean", config.window)
    if start is None or not _all(recent, lambda length: length > config.length_growth * start):
        return None
    scores = _finite(rows, "eval/score")
    if len(scores) < 3:
        return None
    best, latest = max(scores[:-2]), scores[-2:]
    if not all(best - score > _HELD_OUT_FALL * abs(best) for score in latest):
        return None
    return (
        f"responses grew from {start:.0f} to {fmean(recent):.0f} tokens while the held-out score fell from {best:.3g} "
        f"to {latest[-1]:.3g}: the reward is probably won by length. Look at the rollouts; rewards.functions has a "
        "`length` reward."
    )


def critic_no_use(rows: Rows, config: AlarmsConfig) -> str | None:
    """After the warm-up the critic explains less than nothing."""
    recent = _last(_critic_rows(rows), "critic/explained_variance", config.window)
    if not _all(recent, lambda share: share < config.explained_variance):
        return None
    return (
        f"the critic's explained variance is {recent[-1]:.2g}, worse than a constant, while the actor learns from it. "
        "Give it a longer algorithm.critic_warmup (or auto), or change critic.learning_rate."
    )


def critic_worse(rows: Rows, config: AlarmsConfig) -> str | None:
    """The critic's explained variance fell far below its best."""
    values = _finite(_critic_rows(rows), "critic/explained_variance")
    length = _LONG_WINDOWS * config.window
    if len(values) < 2 * length:
        return None
    best = max(fmean(values[i : i + length]) for i in range(len(values) - 2 * length + 1))
    latest = fmean(values[-length:])
    if best - latest <= config.explained_variance_drop:
        return None
    return (
        f"the critic's explained variance fell from {best:.2f} to {latest:.2f} (means of {length} steps): it no "
        "longer follows the policy. Raise critic.learning_rate or critic.passes_per_step, or lower "
        "train.optimizer.learning_rate."
    )


def far_from_reference(rows: Rows, config: AlarmsConfig) -> str | None:
    """KL to the reference over the limit."""
    recent = _last(rows, "actor/kl_ref", config.window)
    if not _all(recent, lambda nats: nats > config.kl_limit):
        return None
    advice = "Raise algorithm.kl.coef, or lower train.optimizer.learning_rate."
    return f"the KL to the reference is {recent[-1]:.3g} nats per token. {advice}"


def slow(rows: Rows, config: AlarmsConfig) -> str | None:
    """Throughput collapsed, and steps take longer for it. Shorter responses alone also lower it: that is no fault."""
    # Steps without an update (critic warm-up, nothing to learn) are faster, and no measure for those with one.
    rows = [row for row in rows if "actor/loss" in row] or rows
    rates = _finite(rows, "throughput/tokens_per_second")
    if len(rates) < 2 * config.window:
        return None
    best = max(fmean(rates[i : i + config.window]) for i in range(len(rates) - config.window))
    recent = rates[-config.window :]
    if not _all(recent, lambda rate: rate < config.throughput_drop * best):
        return None
    times = _finite(rows, "time/step")
    if times and min(times[-config.window :]) <= median(times[: -config.window] or times):
        return None
    return (
        f"{fmean(recent):,.0f} tokens per second, where the run's best was {best:,.0f}: look for another process on "
        "the machine, swapping, or a slow disk. The bar of the last step shows which phase is slow."
    )


ALARMS: dict[str, Check] = {
    "alarm-nan": not_a_number,
    "alarm-nothing-to-learn": nothing_to_learn,
    "alarm-entropy-collapse": entropy_collapse,
    "alarm-entropy-explosion": entropy_explosion,
    "alarm-first-ratio": first_ratio,
    "alarm-engine-gap": engine_gap,
    "alarm-length-runaway": length_runaway,
    "alarm-critic": critic_no_use,
    "alarm-critic-worse": critic_worse,
    "alarm-kl": far_from_reference,
    "alarm-throughput": slow,
}


class AlarmBell:
    """Runs all alarms on each step and says each only once in a run.

    Args:
        config: Thresholds.
        history: Rows of earlier steps, when a run goes on.
        said: Codes already said: those in `alarms.jsonl` of a run that goes on. Codes that end the run are said
            again: going on into the same wall must not look like success.
    """

    def __init__(self, config: AlarmsConfig, history: Iterable[Row] = (), said: Iterable[str] = ()) -> None:
        self._config = config
        self._first: list[Row] = []
        self._newest: deque[Row] = deque(maxlen=max(_NEWEST, 4 * _LONG_WINDOWS * config.window))
        for row in history:
            self._keep(row)
        self._said = set(said) - set(config.stop_on)

    def ring(self, step: int, metrics: Row) -> list[Alarm]:
        """Take a step's metrics; return the alarms that go off for the first time."""
        if self._newest and self._newest[-1].get("step") == metrics.get("step", math.nan):
            self._newest.pop()  # the same row with more in it
        self._keep(metrics)
        rows = [*self._first, *self._newest]
        new = [
            Alarm(code, step, message)
            for code, check in ALARMS.items()
            if code not in self._said and (message := check(rows, self._config)) is not None
        ]
        self._said.update(alarm.code for alarm in new)
        return new

    def _keep(self, row: Row) -> None:
        if len(self._newest) == self._newest.maxlen and len(self._first) < 2 * _LONG_WINDOWS * self._config.window:
            self._first.append(self._newest.popleft())
        self._newest.append(row)

    def ends_run(self, alarm: Alarm) -> bool:
        """Say whether `alarms.stop_on` names this alarm."""
        return alarm.code in self._config.stop_on


def _finite(rows: Iterable[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def _last(rows: Rows, name: str, count: int) -> list[float]:
    """Return the last `count` values, or nothing when there are not so many."""
    values: list[float] = []
    for row in reversed(rows):
        if name in row and math.isfinite(row[name]):
            values.append(row[name])
            if len(values) == count:
                return values[::-1]
    return []


def _start_and_last(rows: Rows, name: str, count: int) -> tuple[float | None, list[float]]:
    """Return the mean of the first `count` values and the last `count`; (None, []) while the two overlap."""
    values = _finite(rows, name)
    if len(values) < 2 * count:
        return None, []
    return fmean(values[:count]), values[-count:]


def _all(values: list[float], holds: Callable[[float], bool]) -> bool:
    return bool(values) and all(holds(value) for value in values)


def _critic_rows(rows: Rows) -> list[Row]:
    """Return the rows in which the actor learns and returns still vary."""
    training = [row for row in rows if row.get("warmup/actor_trains", 1.0) > 0]
    widest = max(_finite(training, "reward/std"), default=0.0)
    return [row for row in training if row.get("reward/std", widest) >= _MIN_SPREAD * widest]
