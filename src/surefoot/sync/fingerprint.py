"""A number for each tensor's bytes, cheap enough to take of every weight at every sync, on the device where it lies.

It tells tensors apart that were swapped, cut, shifted, zeroed or not updated. It is no cryptographic digest: nobody
forges weights here, they get lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from .items import ALIGNMENT, Item, used, view

_WORDS = ALIGNMENT // 4  # int32 words of one row of the buffer


def fingerprints(buffer: Tensor, items: Sequence[Item]) -> Tensor:
    """Return the fingerprints `[items]`, int64 on the buffer's device, of the tensors in a buffer of bytes.

    What lies between tensors must be 0. Both sides of a sync lie on the same kind of device, which decides how they are
    computed. On a CPU each is xxh3 of the tensor's bytes. On a GPU all of them come out of three reads of the buffer,
    however many there are: sums over the words of each aligned row (all, every other, the first half), weighted by the
    row's place, cut at the tensors' borders.
    """
    if buffer.device.type == "cpu":
        raw = buffer.numpy().data
        digests = [xxhash.xxh3_64_intdigest(raw[i.start : i.start + i.size]) - (1 << 63) for i in items]
        return torch.tensor(digests, dtype=torch.int64)
    rows = buffer[: used(items)].view(torch.int32).view(-1, _WORDS)
    sums = rows.sum(1, dtype=torch.int64)
    sums = 3 * sums + 5 * rows[:, ::2].sum(1, dtype=torch.int64) + 7 * rows[:, : _WORDS // 2].sum(1, dtype=torch.int64)
    # Odd multipliers that differ by place; int64 arithmetic wraps around, on every device alike.
    sums *= torch.arange(len(sums), device=sums.device, dtype=torch.int64) * 0x9E3779B97F4A7C1 + 1
    ends = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
    low = torch.tensor([i.start // ALIGNMENT for i in items], device=sums.device)
    high = torch.tensor([-(-(i.start + i.size) // ALIGNMENT) for i in items], device=sums.device)
    return ends[high] - ends[low]


def pack(tensors: Sequence[Tensor], items: Sequence[Item], buffer: Tensor) -> None:
    """Put tensors at their places in a buffer, and 0 between them."""
    buffer[: used(items)].zero_()
    for tensor, item in zip(tensors, items, strict=True):
        view(buffer, item).copy_(tensor)
