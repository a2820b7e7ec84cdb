"""The trainer's side of a sync: weights, walked once, into one buffer that is filled again and again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .fingerprint import fetch, fingerprint
from .parcel import CudaBuffer, Item, Parcel, SharedBuffer, place, view


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
        self._sent: dict[str, Tensor] = {}

    def begin(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Start over with a walk over all weights."""
        self._weights, self._sent = weights, {}
        self._waiting = next(weights, None)

    def next_parcel(self) -> Parcel | None:
        """Publish the next bucket; None when all weights were published."""
        if self._waiting is None:
            return None
        self._have_room_for(self._waiting[1].nbytes)
        assert self._buffer is not None
        items: list[Item] = []
        end = 0
        while self._waiting is not None:
            name, tensor = self._waiting
            item = place(name, tensor, end)
            end = item.start + item.size
            if end > len(self._buffer.tensor):
                break
            view(self._buffer.tensor, item).copy_(tensor)
            self._sent[name] = fingerprint(tensor)
            items.append(item)
            self._waiting = next(self._weights, None)
        self._buffer.publish()
        return Parcel(tuple(items), self._buffer.addresses)

    def fingerprints(self) -> dict[str, int]:
        """Of everything that was published since `begin`."""
        return fetch(self._sent)

    def close(self) -> None:
        """Give the buffer's memory back."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _have_room_for(self, size: int) -> None:
        if self._buffer is not None and len(self._buffer.tensor) >= size:
            return
        self.close()
        self._size = max(self._size, size)
        self._buffer = CudaBuffer(self._size, self._device) if self._same_gpu else SharedBuffer(self._size)
