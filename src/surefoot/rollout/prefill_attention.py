"""Causal attention of the prompts that a step prefills, each within itself, in batches of like length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_PADDING = 1.25  # prompts share a batch while it holds at most this multiple of their tokens


def prefill_batches(lengths: Sequence[int], start: int, device: torch.device) -> list[PrefillBatch]:
    """Batch prompts that lie behind one another from `start` of a packed row on."""
    starts = [start]
    for length in lengths:
        starts.append(starts[-1] + length)
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= _PADDING * sum(lengths[j] for j in [*groups[-1], i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [PrefillBatch([(starts[i], lengths[i]) for i in group], device) for group in groups]


class PrefillBatch:
    """Some prompts of a packed row, each `(start, length)`; sorted by length."""

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._width = spans[-1][1]
        self._count = len(spans)
        # Equally long and behind one another: a view does. Sorting by length keeps such prompts in order.
        self._slice: slice | None = None
        first = spans[0][0]
        if all(span == (first + i * self._width, self._width) for i, span in enumerate(spans)):
            self._slice = slice(first, first + self._count * self._width)
        position = torch.arange(self._width, device=device)
        starts, lengths = torch.tensor(spans, device=device).unbind(1)
        real = position < lengths[:, None]
        # Padding stands at the end, where no token looks; it repeats the prompt's first token.
        self._index = torch.where(real, starts[:, None] + position, starts[:, None]).flatten()
        self._source = real.flatten().nonzero()[:, 0]
        self._target = self._index[self._source]
        self._age = position[:, None] - position

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, window: int | None) -> None:
        """Queries, keys and values `[T, heads, D]`, all of the packed row; writes its tokens' part of `out`."""
        qs, ks, vs = (self._take(x) for x in (q, k, v))
        mask = None
        if window is not None and window < self._width:
            hidden = (self._age < 0) | (self._age >= window)
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
        grouped = q.shape[1] != k.shape[1]
        part = F.scaled_dot_product_attention(
            qs, ks, vs, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        part = part.transpose(1, 2).reshape(self._count * self._width, *out.shape[1:])
        if self._slice is not None:
            out[self._slice] = part
        else:
            out.index_copy_(0, self._target, part[self._source])

    def _take(self, x: Tensor) -> Tensor:
        """`[T, heads, D]` -> `[prompts, heads, width, D]`."""
        rows = x[self._slice] if self._slice is not None else x[self._index]
        return rows.view(self._count, self._width, *x.shape[1:]).transpose(1, 2)
