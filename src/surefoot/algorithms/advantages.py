"""Advantage estimators and returns: pure functions of flat columns.

None of them is differentiated through: inputs are detached, results carry no graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .segments import numbers


def gae(rewards_T: Tensor, values_T: Tensor, cu_seqlens: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), and the critic's targets advantages + values.

    The state after a row's last token is terminal: its value is 0. Steps are model tokens, so a tool's answer
    between two of them takes no time: it is neither discounted nor valued.

    Args:
        rewards_T: Reward of each token.
        values_T: Value of the state before each token is chosen.
        cu_seqlens: Row bounds `[S+1]`.
        gamma: Discount per token.
        lam: 0 gives one-step TD errors, 1 the return minus the value.

    Returns:
        advantages `[T]` and returns `[T]`.
    """
    values_T = values_T.detach()
    ends = cu_seqlens[1:][cu_seqlens.diff() > 0] - 1
    next_values_T = values_T.roll(-1)
    next_values_T[ends] = 0
    deltas_T = rewards_T.detach() + gamma * next_values_T - values_T
    advantages_T = _reverse_scan(deltas_T, cu_seqlens, gamma * lam)
    return advantages_T, advantages_T + values_T


def discounted_returns(rewards_T: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """Sum of the rewards from each token to its row's end, discounted by gamma per model token: `[T]`."""
    return _reverse_scan(rewards_T.detach(), cu_seqlens, gamma)


def group_relative(scores_R: Tensor, group_R: Tensor, normalize_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Score minus the mean of its group, over the group's sample standard deviation (GRPO, arXiv:2402.03300).

    Without the division this is Dr. GRPO's advantage (arXiv:2503.20783). The deviation has n - 1 in its
    denominator and `eps` is added to it, as in verl.

    Args:
        scores_R: Score of each rollout; NaN where it has none (the reward abstained).
        group_R: Group number of each rollout, int64, from 0.
        normalize_by_std: Divide by the deviation.
        eps: Added to the deviation.

    Returns:
        Advantages `[R]` in the dtype of the scores. Rollouts without a score get 0 and take no part in mean and
        deviation. A group with equal scores, or with one score, gets exactly 0: there is nothing to compare.
    """
    scored_R = ~scores_R.isnan()
    groups = int(group_R.max()) + 1 if len(group_R) else 0
    # In float64 and measured from the group's smallest score: equal scores then give zeros, not rounding noise that
    # the division would blow up.
    scores = scores_R.detach().double()
    lowest = scores.new_full((groups,), math.inf).scatter_reduce(0, group_R, scores.where(scored_R, math.inf), "amin")
    above_R = (scores - lowest[group_R]).where(scored_R, 0)

    def group_sum(x_R: Tensor) -> Tensor:
        return x_R.new_zeros(groups).index_add(0, group_R, x_R)

    count = group_sum(scored_R.double())
    centred_R = (above_R - (group_sum(above_R) / count.clamp(min=1))[group_R]).where(scored_R, 0)
    if normalize_by_std:
        deviation = (group_sum(centred_R**2) / (count - 1).clamp(min=1)).sqrt()
        centred_R = centred_R / (deviation + eps)[group_R]
    return centred_R.to(scores_R.dtype)


def whiten(x_T: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and variance 1 (n - 1 in its denominator; `eps` is added to it, as in verl).

    Equal entries, or a single one, give exactly 0.
    """
    if len(x_T) < 2 or bool((x_T == x_T[0]).all()):
        return torch.zeros_like(x_T)
    return (x_T - x_T.mean()) * (x_T.var() + eps).rsqrt()


def explained_variance(values_T: Tensor, returns_T: Tensor) -> float | None:
    """Share of the returns' variance that the values explain: 1 - Var(returns - values) / Var(returns).

    1 is a perfect critic, 0 one as good as a constant. None when the returns do not vary (or there are fewer than
    two): nothing was there to be explained.
    """
    if len(returns_T) < 2 or bool((returns_T == returns_T[0]).all()):
        return None
    return float(1 - (returns_T - values_T).var() / returns_T.var())


def _reverse_scan(x_T: Tensor, cu_seqlens: Tensor, decay: float) -> Tensor:
    """y[t] = x[t] + decay * y[t + 1] within each row, all rows at once, without padding them."""
    lengths = cu_seqlens.diff()
    order = lengths.argsort(descending=True)
    lengths, ends = lengths[order], cu_seqlens[1:][order]
    y_T = x_T.clone()
    longest = max(1, int(lengths[0])) if len(lengths) else 1
    # Rows are sorted by length, so those that still have a token k places before their end are a prefix.
    back = torch.arange(1, longest, device=x_T.device)
    alive = torch.searchsorted(-lengths, -back)
    for k, rows in enumerate(numbers(alive), start=1):
        here = ends[: int(rows)] - 1 - k
        y_T[here] += decay * y_T[here + 1]
    return y_T
