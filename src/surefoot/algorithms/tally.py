"""Weighted metrics of one micro-batch, brought to the host in one transfer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..records import Metric
from .aggregate import Denominators
from .columns import LossColumns
from .segments import expand, numbers


class Tally:
    """Collects statistics of a micro-batch. Tokens count by their row's weight: rows that are left out aren't seen."""

    def __init__(self, columns: LossColumns, denominators: Denominators) -> None:
        self._weight_T = expand(columns.weight_S.double(), columns.cu_seqlens, len(columns.advantages_T))
        self._minibatch_tokens = denominators.tokens
        self._sums: dict[str, Tensor] = {}
        self._shares: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def mean(self, name: str, x_T: Tensor) -> None:
        """Mean over tokens."""
        self._sums[name] = (x_T.detach().double() * self._weight_T).masked_fill(self._weight_T == 0, 0).sum()

    def max(self, name: str, x_T: Tensor) -> None:
        """Maximum over tokens, of numbers that are never negative."""
        kept_T = x_T.detach().double().masked_fill(self._weight_T == 0, 0)
        self._maxima[name] = kept_T.max() if len(kept_T) else kept_T.sum()

    def share(self, name: str, scalar: Tensor) -> None:
        """A micro-batch's share of a minibatch's sum, as `aggregate` gives it.

        Published as a mean weighted by tokens, and scaled so that the metric of all micro-batches of one minibatch
        is the minibatch's loss, and that of several minibatches the mean of their losses.
        """
        self._shares[name] = scalar.detach().double() * self._minibatch_tokens

    def metrics(self) -> dict[str, Metric]:
        """Bring everything to the host."""
        means = self._sums | self._shares
        stacked = torch.stack([self._weight_T.sum(), *means.values(), *self._maxima.values()])
        weight, *totals = numbers(stacked)
        found = {name: Metric(x / (weight or 1.0), weight) for name, x in zip(means, totals, strict=False)}
        for name, x in zip(self._maxima, totals[len(means) :], strict=True):
            found[name] = Metric(x, weight, "max")
        return found
