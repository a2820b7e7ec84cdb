"""Per-token estimates of KL(policy || reference), and the controller of their factor.

Where the estimate is used decides which one is right (arXiv:2510.01555). In the reward it is a number, and only k1
has the KL's gradient: that of k3 there is of third order near the reference, so it would hold nothing. In the loss
it is differentiated: k2's gradient is the KL's own, k3's that of KL(reference || policy), and k1's has mean zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from ..config.algorithm import KlConfig, KlEstimator
from .losses import clamped_log_ratio

MAX_K3 = 10.0
"""k3 is clamped to this, as in verl: it grows like e^x where the reference likes a token far better, and one such token
would drown the step."""


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """log p - log q: unbiased, of any sign."""
    return logprobs_T - ref_logprobs_T


def absolute(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """|log p - log q|: biased; its gradient has the same size at every distance."""
    return (logprobs_T - ref_logprobs_T).abs()


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased as a value, unbiased as a gradient."""
    return 0.5 * (logprobs_T - ref_logprobs_T) ** 2


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased below its clamp, never negative (Schulman 2020, "Approximating KL divergence")."""
    log_ratio_T = clamped_log_ratio(ref_logprobs_T, logprobs_T)
    return (log_ratio_T.exp() - 1 - log_ratio_T).clamp(max=MAX_K3)


ESTIMATORS: Mapping[KlEstimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}

SOUND: Mapping[Literal["reward", "loss"], tuple[KlEstimator, ...]] = {"reward": ("k1",), "loss": ("k3", "k2", "abs")}
"""Estimators whose gradient pulls towards the reference, by where they are used; the first is the default there."""


def estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) at each token `[T]`, in nats, from tokens that the policy sampled.

    Value and gradient are finite at any log-ratio. No gradient flows to the reference.
    """
    return ESTIMATORS[estimator](logprobs_T, ref_logprobs_T.detach())


def adaptive(coef: float, kl_per_sequence: float, num_sequences: int, config: KlConfig) -> float:
    """Move the factor towards the one that holds the KL at `config.target` (arXiv:1909.08593, section 2.2)."""
    error = min(max(kl_per_sequence / config.target - 1, -0.2), 0.2)
    return coef * (1 + error * num_sequences / config.horizon)


def fixed(coef: float, kl_per_sequence: float, num_sequences: int, config: KlConfig) -> float:
    """Keep the factor."""
    return coef


CONTROLLERS: Mapping[Literal["fixed", "adaptive"], Callable[[float, float, int, KlConfig], float]] = {
    "fixed": fixed,
    "adaptive": adaptive,
}


def next_coef(config: KlConfig, coef: float, kl_per_sequence: float, num_sequences: int) -> float:
    """Return the factor of the next step.

    Args:
        config: `algorithm.kl`.
        coef: The factor of this step; `config.coef` at the first.
        kl_per_sequence: Mean over this step's sequences of the sum over their tokens, in nats.
        num_sequences: How many sequences that was.
    """
    return CONTROLLERS[config.controller](coef, kl_per_sequence, num_sequences, config)
