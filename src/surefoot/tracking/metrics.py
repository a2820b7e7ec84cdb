"""Rollouts and reports -> the numbers of a step, under the names that alarms and displays read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from ..records import Metric, Rollout


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Return what a step's scored rollouts look like: rewards, their spread, lengths, truncation.

    A rollout counts as truncated when its finish reason says so; no length is compared with any limit or with
    another row's. Groups with fewer than two scored rollouts have no variance to speak of and are not counted.
    A metric with nothing to count is left out, so no metric is ever NaN for want of rows.

    Example:
        Two groups with scores [1, 1] and [0, 1]: `reward/mean` 0.75, `reward/zero_variance_groups` 0.5.
    """
    if not rollouts:
        return {}
    lengths = [rollout.num_model_tokens for rollout in rollouts]
    metrics = {
        "rollout/count": Metric(len(rollouts), kind="sum"),
        "rollout/truncated": _mean([rollout.finish_reason == "length" for rollout in rollouts]),
        "rollout/aborted": _mean([rollout.finish_reason == "aborted" for rollout in rollouts]),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": Metric(max(lengths), kind="max"),
        "rollout/length_min": Metric(min(lengths), kind="min"),
        "rollout/prompt_length_mean": _mean([len(rollout.prompt.token_ids) for rollout in rollouts]),
    }
    tokens = sum(lengths)
    if tokens:
        # Minus the log-probability of what was sampled has the entropy as its mean, and every row has it for nothing.
        surprise = -sum(float(rollout.logprobs[rollout.loss_mask].sum()) for rollout in rollouts)
        metrics["rollout/entropy"] = Metric(surprise / tokens, weight=tokens)
    counts = Counter[str]()
    for rollout in rollouts:
        counts.update(rollout.counts)
    metrics |= {f"rollout/{name}": Metric(float(count), kind="sum") for name, count in counts.items()}
    return metrics | _reward_metrics(rollouts)


def _reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if not rewards:
        return {}
    scores = [reward.score for reward in rewards if reward.score is not None]
    groups: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None and rollout.reward.score is not None:
            groups[rollout.prompt.id].append(rollout.reward.score)
    for reward in rewards:
        for name, value in reward.parts.items():
            if value is not None:
                parts[name].append(value)
    metrics = {
        "reward/unscored": Metric(len(rewards) - len(scores), kind="sum"),
        "reward/errors": Metric(sum(reward.error is not None for reward in rewards), kind="sum"),
    }
    metrics |= {f"reward/part/{name}": _mean(values) for name, values in parts.items()}
    if scores:
        metrics["reward/mean"] = _mean(scores)
        metrics["reward/std"] = Metric(pstdev(scores), weight=len(scores))
        metrics["reward/max"] = Metric(max(scores), kind="max")
        metrics["reward/min"] = Metric(min(scores), kind="min")
    if comparable := [group for group in groups.values() if len(group) > 1]:
        metrics["reward/zero_variance_groups"] = _mean([min(group) == max(group) for group in comparable])
    return metrics


def flatten(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return plain numbers. Means of weight 0 speak of nothing and are left out."""
    return {name: float(m.value) for name, m in metrics.items() if m.kind != "mean" or m.weight > 0}


def _mean(values: Sequence[float]) -> Metric:
    return Metric(fmean(values), weight=len(values))
