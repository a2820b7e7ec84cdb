"""Sums and spreads over the rows of a flat column."""

from __future__ import annotations

from typing import cast

from torch import Tensor


def expand(x_S: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Give each of the `total` tokens its row's entry: `[S]` -> `[T]`."""
    # The known total spares a GPU the wait for the host that counting the repeats would take.
    return x_S.repeat_interleave(cu_seqlens.diff(), output_size=total)


def row_sum(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum each row's tokens: `[T]` -> `[S]`. A row without tokens gives 0."""
    rows = cu_seqlens.new_tensor(range(len(cu_seqlens) - 1))
    return x_T.new_zeros(len(rows)).index_add(0, expand(rows, cu_seqlens, len(x_T)), x_T)


def numbers(x: Tensor) -> list[float]:
    """Bring a flat tensor to the host in one transfer, as Python numbers."""
    return cast("list[float]", x.tolist())  # pyright: ignore[reportUnknownMemberType]
