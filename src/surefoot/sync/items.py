"""Tensors behind one another in a buffer of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; views of any dtype may start there


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor in a buffer: its Hugging Face name, dtype, shape, and place in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def place(name: str, tensor: Tensor, end: int) -> Item:
    """Where a tensor goes in a buffer that is full up to `end`."""
    start = -(-end // ALIGNMENT) * ALIGNMENT
    return Item(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)


def used(items: Sequence[Item]) -> int:
    """Bytes of a buffer that items take, from its start."""
    return -(-(items[-1].start + items[-1].size) // ALIGNMENT) * ALIGNMENT


def view(buffer: Tensor, item: Item) -> Tensor:
    """A tensor in a buffer."""
    piece = buffer[item.start : item.start + item.size]
    return piece.view(getattr(torch, item.dtype)).view(item.shape)
