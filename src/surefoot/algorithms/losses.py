"""Losses per token: pure functions of flat columns, not yet summed.

Each returns the loss `[T]` and a dict of detached columns `[T]` whose means are worth logging.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this, so that exp and its gradient stay finite: e^20 = 4.9e8. The same as in verl."""


def ppo_clip(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), negated; with dual clip (arXiv:1912.09729).

    Gradient flows through `logprobs_T` alone. It is zero where the clip holds the ratio, and finite at any log-ratio.

    Args:
        logprobs_T: Log-probabilities under the policy that is trained.
        old_logprobs_T: The same under the policy that the advantages speak of.
        advantages_T: Advantages.
        clip_low: The ratio counts as no less than 1 - clip_low ...
        clip_high: ... and no more than 1 + clip_high, where that makes the loss larger.
        dual_clip: Upper bound of the loss as a multiple of |advantage| where the advantage is negative; None: no bound.
    """
    advantages_T = advantages_T.detach()
    ratio_T = clamped_log_ratio(logprobs_T, old_logprobs_T.detach()).exp()
    free_T = -advantages_T * ratio_T
    held_T = -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(free_T, held_T)
    clipped_T = held_T > free_T
    stats = {
        "ratio": ratio_T,
        "ratio_gap": (ratio_T - 1).abs(),
        "clip_low": clipped_T & (ratio_T < 1),
        "clip_high": clipped_T & (ratio_T > 1),
    }
    if dual_clip is not None:
        bound_T = -advantages_T * dual_clip
        stats["clip_dual"] = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(advantages_T < 0, torch.minimum(loss_T, bound_T), loss_T)
    return loss_T, {name: column.detach() for name, column in stats.items()}


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the critic, with PPO2's value clipping (described in arXiv:2005.12729).

    Args:
        values_T: Values under the critic that is trained; gradient flows through them alone.
        old_values_T: Values before the step's updates.
        returns_T: Targets.
        clip: The new value counts as no further than this from the old one, where that makes the loss larger; None:
            no clipping.
    """
    returns_T, old_values_T = returns_T.detach(), old_values_T.detach()
    loss_T = (values_T - returns_T) ** 2
    stats = {"value": values_T.detach(), "error": (values_T - returns_T).abs().detach()}
    if clip is not None:
        held_T = (torch.clamp(values_T, old_values_T - clip, old_values_T + clip) - returns_T) ** 2
        stats["clip"] = (held_T > loss_T).detach()
        loss_T = torch.maximum(loss_T, held_T)
    return 0.5 * loss_T, stats


def importance_weight(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, cap: float) -> Tensor:
    """Truncated importance weight min(p_trainer / p_engine, cap) of each token (Ionides 2008; arXiv:1802.01561, eq. 1).

    The engine that sampled and the trainer compute the same policy with different arithmetic; this corrects for
    it. No gradient flows through the weight.
    """
    return clamped_log_ratio(old_logprobs_T, rollout_logprobs_T).exp().clamp(max=cap).detach()


def clamped_log_ratio(logprobs_T: Tensor, other_logprobs_T: Tensor) -> Tensor:
    """Return logprobs - other, within +-`MAX_LOG_RATIO`; beyond it the gradient is 0."""
    return (logprobs_T - other_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
