"""A number for a tensor's bytes, cheap enough to take of every weight at every sync, on the device where it lies.

It tells tensors apart that were swapped, cut, shifted, zeroed or not updated. It is no cryptographic digest: nobody
forges weights here, they get lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a tensor's fingerprint as a 0-d int64 on its device, without waiting for it.

    Both sides of a sync lie on the same kind of device: what it is computed by depends on that. On a CPU it is xxh3 of
    the bytes. On a GPU it is a sum over the words of each row and of each column, weighted by their places: two reads
    of the memory and nothing else.
    """
    plain = tensor.detach().contiguous()
    if plain.device.type == "cpu":
        digest = xxhash.xxh3_64_intdigest(plain.view(-1).view(torch.uint8).numpy().data)
        return torch.tensor(digest - (1 << 63), dtype=torch.int64)
    words = plain.view(-1).view(_WORDS[plain.element_size()])
    table = words.view(plain.shape[0], -1) if plain.ndim > 1 and plain.numel() else words[None]
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    return (rows * _weights(rows)).sum() * 3 + (columns * _weights(columns)).sum()


def _weights(sums: Tensor) -> Tensor:
    # Odd multipliers that differ by place; int64 arithmetic wraps around, on every device alike.
    return torch.arange(len(sums), device=sums.device, dtype=torch.int64) * 0x9E3779B97F4A7C1 + 1


def fetch(fingerprints: Mapping[str, Tensor]) -> dict[str, int]:
    """Bring fingerprints to the host, all in one transfer."""
    if not fingerprints:
        return {}
    numbers = torch.stack(list(fingerprints.values())).cpu().tolist()
    return dict(zip(fingerprints, numbers, strict=True))


def first_difference(sent: Mapping[str, int], arrived: Mapping[str, int]) -> str | None:
    """Say what is wrong with the first tensor that did not arrive as it was sent; None when all did."""
    for name, number in sent.items():
        if name not in arrived:
            return f"{name} did not arrive"
        if arrived[name] != number:
            return f"{name} is not what was sent"
    extra = next((name for name in arrived if name not in sent), None)
    return f"{extra} arrived and was not sent" if extra else None
