"""The trainer's side of a sync: weights, walked once, into one buffer that is filled again and again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .fingerprint import fingerprints, pack
from .items import ALIGNMENT, Item, place
from .parcel import CudaBuffer, Parcel, SharedBuffer


class Publisher:
    """Publishes weights bucket by bucket. A bucket is gone when the next is asked for.

    Args:
        bucket_bytes: Size of the buffer. It grows when a single tensor is larger.
        device: Where the tensors are.
        same_gpu: The readers are on this process's GPU; otherwise the bytes go through the host's memory.
    """

    def __init__(self, bucket_bytes: int, device: torch.device, same_gpu: bool) -> None:
        self._size, self._device = bucket_bytes, device
        self._same_gpu = same_gpu and device.type == "cuda"
        self._buffer: CudaBuffer | SharedBuffer | None = None
        self._weights: Iterator[tuple[str, Tensor]] = iter(())
        self._waiting: tuple[str, Tensor] | None = None

    def begin(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Start over with a walk over all weights."""
        self._weights = weights
        self._waiting = next(weights, None)

    def next_parcel(self) -> Parcel | None:
        """Publish the next bucket; None when all weights were published."""
        if self._waiting is None:
            return None
        self._have_room_for(self._waiting[1].nbytes)
        assert self._buffer is not None
        items: list[Item] = []
        tensors: list[Tensor] = []
        end = 0
        while self._waiting is not None:
            name, tensor = self._waiting
            item = place(name, tensor, end)
            end = item.start + item.size
            if end > len(self._buffer.tensor):
                break
            items.append(item)
            tensors.append(tensor)
            self._waiting = next(self._weights, None)
        pack(tensors, items, self._buffer.tensor)
        numbers = fingerprints(self._buffer.tensor, items).tolist()  # waits until the bytes are there, for all
        return Parcel(tuple(items), tuple(numbers), self._buffer.addresses)

    def close(self) -> None:
        """Give the buffer's memory back."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _have_room_for(self, size: int) -> None:
        if self._buffer is not None and len(self._buffer.tensor) >= size:
            return
        self.close()
        self._size = -(-max(self._size, size) // ALIGNMENT) * ALIGNMENT
        self._buffer = CudaBuffer(self._size, self._device) if self._same_gpu else SharedBuffer(self._size)
