"""How token losses become one number, whatever way the minibatch is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.algorithm import Aggregation
from .segments import expand


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts of one whole minibatch, taken before it is split over micro-batches and ranks.

    Rows count by their weight: a row that is left out (weight 0) is in neither count.

    Example:
        Rows of 4 and 6 tokens, the second left out: tokens 4, sequences 1.
    """

    tokens: float
    sequences: float

    @classmethod
    def of(cls, lengths: Sequence[int], weights: Sequence[float] | None = None) -> Denominators:
        """Count rows of `lengths` model tokens each, over all micro-batches and all ranks."""
        weights = [1.0] * len(lengths) if weights is None else weights
        pairs = list(zip(lengths, weights, strict=True))
        return cls(
            tokens=float(sum(length * weight for length, weight in pairs)),
            sequences=float(sum(weight for length, weight in pairs if length)),
        )


Factor = Callable[[Tensor, Denominators, float], Tensor]
"""(row lengths `[S]`, denominators, norm) -> factor of each token of a row `[S]`."""


def _each(lengths_S: Tensor, denominator: float) -> Tensor:
    # An empty minibatch has denominator 0, and no row with a weight: any finite factor gives loss 0.
    return torch.full_like(lengths_S, 1 / (denominator or 1.0))


AGGREGATIONS: Mapping[Aggregation, Factor] = {
    "token-mean": lambda lengths_S, d, norm: _each(lengths_S, d.tokens),
    "token-sum": lambda lengths_S, d, norm: _each(lengths_S, 1),
    "seq-mean-token-sum": lambda lengths_S, d, norm: _each(lengths_S, d.sequences),
    "seq-mean-token-mean": lambda lengths_S, d, norm: _each(lengths_S, d.sequences) / lengths_S.clamp(min=1),
    "seq-mean-token-sum-norm": lambda lengths_S, d, norm: _each(lengths_S, d.sequences * norm),
}


def aggregate(
    loss_T: Tensor,
    cu_seqlens: Tensor,
    mode: Aggregation,
    denominators: Denominators,
    weight_S: Tensor | None = None,
    norm: float = 1.0,
) -> Tensor:
    """Sum a micro-batch's share of the minibatch's loss.

    The sum of the results over all micro-batches and ranks is the loss of the minibatch, and the sum of their
    gradients its gradient. (A data-parallel engine that *averages* gradients over ranks multiplies by their number.)

    Args:
        loss_T: Loss of each model token of the micro-batch.
        cu_seqlens: Row bounds `[S+1]`.
        mode: A key of `AGGREGATIONS`.
        denominators: Counts of the whole minibatch.
        weight_S: Weight of each row; 0 leaves it out. None: all 1.
        norm: The constant length by which `seq-mean-token-sum-norm` divides (arXiv:2503.20783: the generation
            budget), in tokens. Other modes don't read it.

    Returns:
        A scalar with a graph, 0 for an empty micro-batch or one whose rows are all left out.
    """
    factor_S = AGGREGATIONS[mode](cu_seqlens.diff().to(loss_T.dtype), denominators, norm)
    if weight_S is not None:
        factor_S = factor_S * weight_S
    factor_T = expand(factor_S, cu_seqlens, len(loss_T))
    return (loss_T * factor_T).masked_fill(factor_T == 0, 0).sum()
