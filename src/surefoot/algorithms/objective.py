"""The objectives of one update: what an engine calls with what its model computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..config.algorithm import Aggregation
from ..records import Metric
from . import kl
from .aggregate import Denominators, aggregate
from .columns import LossColumns
from .losses import clamped_log_ratio, importance_weight, value_loss
from .table import POLICY_LOSSES, Algorithm
from .tally import Tally


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Policy loss x importance weight + KL - entropy bonus, aggregated.

    Metrics: `loss`, `policy_loss`; the policy loss's own (PPO: `ratio`, `ratio_gap` = |ratio - 1|, `clip_low`,
    `clip_high`, `clip_dual` as fractions of tokens); `approx_kl` and `approx_kl_k3` from the old policy to this
    one; `entropy`; `kl_ref`, and `kl_loss` when it is in the loss; `engine_gap`, `engine_gap_max` and `engine_kl`
    between the engine that sampled and the trainer; `importance_weight`, `importance_capped`.
    """

    algorithm: Algorithm

    def __call__(
        self, logprobs_T: Tensor, entropy_T: Tensor | None, columns: LossColumns, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return this micro-batch's share of the minibatch's loss, and its metrics.

        Args:
            logprobs_T: Log-probabilities of the model tokens under the policy that is trained, with a graph.
            entropy_T: Entropy of the distribution at each model token, in nats; None when nobody needs it.
            columns: What was known before the update.
            denominators: Counts of the whole minibatch.

        Raises:
            RunError: A column holds NaN or infinity (`loss-not-finite`).
        """
        a = self.algorithm
        columns.require_finite(log_probability=logprobs_T, entropy=entropy_T)
        tally = Tally(columns, denominators)
        old_T = logprobs_T.detach() if columns.old_logprobs_T is None else columns.old_logprobs_T

        def share(name: str, loss_T: Tensor) -> Tensor:
            scalar = aggregate(
                loss_T, columns.cu_seqlens, a.aggregation, denominators, columns.weight_S, a.max_response_length
            )
            tally.share(name, scalar)
            return scalar

        loss_T, stats = POLICY_LOSSES[a.policy_loss].run(logprobs_T, old_T, columns, a)
        for name, column in stats.items():
            tally.mean(name, column)
        if a.importance_cap is not None:
            weight_T = importance_weight(old_T, columns.rollout_logprobs_T, a.importance_cap)
            tally.mean("importance_weight", weight_T)
            tally.mean("importance_capped", weight_T >= a.importance_cap)
            loss_T = loss_T * weight_T
        loss = share("policy_loss", loss_T)
        if columns.ref_logprobs_T is not None:
            kl_T = kl.estimate(logprobs_T, columns.ref_logprobs_T, a.kl_estimator)
            tally.mean("kl_ref", kl_T)
            if a.kl.where == "loss":
                loss = loss + a.kl.coef * share("kl_loss", kl_T)
        if entropy_T is not None:
            tally.mean("entropy", entropy_T)
        if a.needs_entropy_grad:
            assert entropy_T is not None, "the entropy bonus needs the entropy"
            loss = loss - a.entropy_coef * share("entropy_bonus", entropy_T)
        tally.share("loss", loss)
        _tally_distances(tally, logprobs_T, old_T, columns)
        return loss, tally.metrics()


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The critic's loss. Metrics: `loss`, `value`, `error` (absolute, to the return), `clip` (fraction of tokens)."""

    aggregation: Aggregation
    clip: float | None
    max_response_length: int = 1

    def __call__(
        self, values_T: Tensor, entropy_T: Tensor | None, columns: LossColumns, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return this micro-batch's share of the minibatch's loss, and its metrics. A critic has no entropy.

        Raises:
            RunError: A column holds NaN or infinity (`loss-not-finite`).
        """
        assert entropy_T is None
        assert columns.values_T is not None
        assert columns.returns_T is not None
        columns.require_finite(value=values_T)
        tally = Tally(columns, denominators)
        loss_T, stats = value_loss(values_T, columns.values_T, columns.returns_T, self.clip)
        for name, column in stats.items():
            tally.mean(name, column)
        loss = aggregate(
            loss_T, columns.cu_seqlens, self.aggregation, denominators, columns.weight_S, self.max_response_length
        )
        tally.share("loss", loss)
        return loss, tally.metrics()


def _tally_distances(tally: Tally, logprobs_T: Tensor, old_T: Tensor, columns: LossColumns) -> None:
    """How far the policy is from the old one, and the trainer from the engine."""
    # The tokens came from the old policy, so k3 has old in the place of p.
    tally.mean("approx_kl", old_T - logprobs_T)
    tally.mean("approx_kl_k3", kl.k3(old_T, logprobs_T.detach()))
    gap_T = clamped_log_ratio(old_T, columns.rollout_logprobs_T)
    tally.mean("engine_gap", gap_T.abs())
    tally.max("engine_gap_max", gap_T.abs())
    tally.mean("engine_kl", kl.k3(columns.rollout_logprobs_T, old_T))
