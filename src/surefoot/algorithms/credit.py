"""Scored rollouts -> samples: who gets how much of the reward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError
from ..records import Floats, Metric, Rollout, Sample, Scores
from ..tracking.metrics import rollout_metrics
from . import filters, kl
from .advantages import discounted_returns, explained_variance, whiten
from .segments import numbers, row_sum
from .table import ADVANTAGES, Algorithm, CreditColumns


def assign_credit(
    rollouts: Sequence[Rollout], scores: Sequence[Scores], algorithm: Algorithm, kl_coef: float
) -> tuple[list[Sample], dict[str, Metric]]:
    """Turn one step's rollouts into samples with advantages.

    The score is the reward of the rollout's last *model* token: the end-of-sequence token if it was emitted, never a
    tool's token. With the KL in the reward each model token pays `kl_coef` times its estimate. All arithmetic is in
    float64, flat over the step's model tokens.

    A rollout is left out (advantage 0, weight 0, no part in whitening) when its reward abstained, when it has no model
    token, or when it was truncated and `algorithm.mask_truncated` holds. The first two don't take part in their
    group's baseline; a truncated one does, for its score is known.

    Args:
        rollouts: The step's rollouts, each with a `Reward`. Those of one prompt id are a group.
        scores: What the models say, one for each rollout. Without `old_logprobs` (one update a step) the KL in
            the reward is that of the policy as the engine computed it.
        algorithm: The resolved algorithm.
        kl_coef: This step's factor of the KL in the reward; not read otherwise.

    Returns:
        One sample for each rollout, in order, and metrics: those of `rollout_metrics` (`reward/*`, `rollout/*`),
        `advantage/*`, `kl/*` with a reference, and `critic/*` with a critic. `critic/explained_variance` is of the
        rewards that really came, not of GAE's targets: these hold the critic's own values, which it would explain
        without knowing anything.

    Raises:
        RunError: A value or log-probability at a model token is NaN or infinite (`loss-not-finite`); it names the row.
    """
    step = _Step.of(rollouts, scores)
    rewards_T = torch.zeros(step.num_tokens, dtype=torch.float64)
    rewards_T[step.cu_seqlens[1:][step.judged_R] - 1] = step.score_R[step.judged_R]
    kl_T = step.kl(algorithm)
    totals_R = step.score_R
    if algorithm.kl.where == "reward":
        assert kl_T is not None
        rewards_T = rewards_T - kl_coef * kl_T
        totals_R = totals_R - row_sum(kl_coef * kl_T, step.cu_seqlens)
    columns = CreditColumns(rewards_T, step.values_T, totals_R, step.group_R, step.cu_seqlens)
    advantages_T, returns_T = ADVANTAGES[algorithm.advantage].run(columns, algorithm)

    kept_R = filters.kept(step.judged_R, step.truncated_R, algorithm.mask_truncated)
    kept_T = step.spread(kept_R)
    if algorithm.whiten_advantages:
        advantages_T = advantages_T.masked_scatter(kept_T, whiten(advantages_T[kept_T]))
    advantages_T = advantages_T.where(kept_T, 0)
    returns_T = None if returns_T is None else returns_T.where(kept_T, 0)

    metrics = rollout_metrics(rollouts) | _advantage_metrics(advantages_T[kept_T])
    metrics["advantage/rows_left_out"] = Metric(float((~kept_R).sum()), kind="sum")
    if kl_T is not None:
        metrics |= _kl_metrics(kl_T, step, kl_coef if algorithm.kl.where == "reward" else algorithm.kl.coef)
    if step.values_T is not None and returns_T is not None:
        outcome_T = discounted_returns(rewards_T, step.cu_seqlens, algorithm.gamma)[kept_T]
        metrics |= _critic_metrics(step.values_T[kept_T], returns_T[kept_T], outcome_T)
    return list(_samples(step, advantages_T, returns_T, kept_R)), metrics


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One step, flat: `_T` over its model tokens, `_R` over its rollouts."""

    rollouts: Sequence[Rollout]
    scores: Sequence[Scores]
    cu_seqlens: Tensor  # [R + 1]
    score_R: Tensor  # NaN: no score
    judged_R: Tensor  # has a score and a model token to put it on
    truncated_R: Tensor
    group_R: Tensor
    values_T: Tensor | None

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], scores: Sequence[Scores]) -> _Step:
        assert len(rollouts) == len(scores), "one Scores for each rollout"
        lengths = [rollout.num_model_tokens for rollout in rollouts]
        numbers: dict[str, int] = {}
        group = [numbers.setdefault(rollout.prompt.id, len(numbers)) for rollout in rollouts]
        score_R = torch.tensor(
            [_score(rollout) if length else math.nan for rollout, length in zip(rollouts, lengths, strict=True)],
            dtype=torch.float64,
        )
        return cls(
            rollouts,
            scores,
            cu_seqlens=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int64),
            score_R=score_R,
            judged_R=~score_R.isnan(),
            truncated_R=filters.truncated([rollout.finish_reason for rollout in rollouts]),
            group_R=torch.tensor(group, dtype=torch.int64),
            values_T=_flat("a value", rollouts, [s.values for s in scores]),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths_R(self) -> Tensor:
        return self.cu_seqlens.diff()

    def spread(self, x_R: Tensor) -> Tensor:
        return x_R.repeat_interleave(self.lengths_R)

    def kl(self, algorithm: Algorithm) -> Tensor | None:
        """KL to the reference of each model token, or None when this run has none."""
        ref_T = _flat("a reference log-probability", self.rollouts, [s.ref_logprobs for s in self.scores])
        if ref_T is None:
            assert not algorithm.needs_reference, "the reference's log-probabilities are missing"
            return None
        old_T = _flat("an old log-probability", self.rollouts, [s.old_logprobs for s in self.scores])
        if old_T is None:
            old_T = _flat("a rollout log-probability", self.rollouts, [rollout.logprobs for rollout in self.rollouts])
        assert old_T is not None
        return kl.estimate(old_T, ref_T, algorithm.kl_estimator)


def _score(rollout: Rollout) -> float:
    """The rollout's score, NaN when its reward abstained."""
    assert rollout.reward is not None, "credit comes after the reward"
    score = rollout.reward.score
    assert score is None or math.isfinite(score), "the reward stage lets no such score through"
    return math.nan if score is None else score


def _flat(name: str, rollouts: Sequence[Rollout], columns: Sequence[Floats | None]) -> Tensor | None:
    """Join the model tokens of `[L]` columns to `[T]`; None when this run has no such column."""
    there = [column for column in columns if column is not None]
    if not there:
        return None
    assert len(there) == len(columns), "a column is there for all rollouts of a step or for none"
    parts = [column[rollout.loss_mask] for column, rollout in zip(there, rollouts, strict=True)]
    for rollout, part in zip(rollouts, parts, strict=True):
        # Here the row is still known; after whitening every row would be spoilt.
        if not np.isfinite(part).all():
            raise RunError(
                "loss-not-finite",
                f"{name} of sample {rollout.sample_index} of prompt {rollout.prompt.id} is not finite",
                got=float(part[~np.isfinite(part)][0]),
                want="a finite number for each model token",
            )
    return torch.as_tensor(np.concatenate(parts).astype(np.float64))


def _samples(step: _Step, advantages_T: Tensor, returns_T: Tensor | None, kept_R: Tensor) -> Iterator[Sample]:
    """Spread the flat columns back over each trajectory, with zeros off the mask."""
    bounds = [int(bound) for bound in numbers(step.cu_seqlens)]

    def row(x_T: Tensor, index: int) -> Floats:
        mask = step.rollouts[index].loss_mask
        full = np.zeros(len(mask), np.float32)
        full[mask] = x_T[bounds[index] : bounds[index + 1]].numpy()
        return full

    for index, (rollout, scores) in enumerate(zip(step.rollouts, step.scores, strict=True)):
        yield Sample(
            group=rollout.prompt.id,
            prompt_length=len(rollout.prompt.token_ids),
            token_ids=rollout.token_ids,
            loss_mask=rollout.loss_mask,
            rollout_logprobs=rollout.logprobs,
            old_logprobs=scores.old_logprobs,
            ref_logprobs=scores.ref_logprobs,
            values=scores.values,
            advantages=row(advantages_T, index),
            returns=None if returns_T is None else row(returns_T, index),
            weight=float(kept_R[index]),
        )


def _advantage_metrics(x: Tensor) -> dict[str, Metric]:
    """Mean, deviation and bounds; nothing when there is nothing."""
    if not len(x):
        return {}
    return {
        "advantage/mean": Metric(float(x.mean()), len(x)),
        "advantage/std": Metric(float(x.std()) if len(x) > 1 else 0.0, len(x)),
        "advantage/min": Metric(float(x.min()), len(x), "min"),
        "advantage/max": Metric(float(x.max()), len(x), "max"),
    }


def _kl_metrics(kl_T: Tensor, step: _Step, coef: float) -> dict[str, Metric]:
    sequences = int((step.lengths_R > 0).sum())
    if not sequences:
        return {}
    return {
        "kl/per_token": Metric(float(kl_T.mean()), len(kl_T)),
        "kl/per_sequence": Metric(float(kl_T.sum()) / sequences, sequences),
        "kl/coef": Metric(coef),
    }


def _critic_metrics(values_T: Tensor, returns_T: Tensor, outcome_T: Tensor) -> dict[str, Metric]:
    if not len(values_T):
        return {}
    metrics = {
        "critic/value_mean": Metric(float(values_T.mean()), len(values_T)),
        "critic/return_mean": Metric(float(returns_T.mean()), len(returns_T)),
    }
    explained = explained_variance(values_T, outcome_T)
    if explained is not None:
        metrics["critic/explained_variance"] = Metric(explained, len(values_T))
    return metrics
