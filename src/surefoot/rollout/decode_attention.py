"""Attention of the decoding rows: one query a row, over a prefix that it shares and a slot of its own.

The two parts are computed apart and joined by their log-sum-exp, which is exact (Juravsky et al. 2024,
arXiv:2402.05099): the keys of a shared prompt are read once for all its samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import Caches
from .scheduler import Row


class DecodeAttention:
    """The attention of one step's decoding rows, at least one; `rows[i]` sits in slot i."""

    def __init__(self, rows: Sequence[Row], caches: Caches, device: torch.device) -> None:
        self._caches = caches
        self._own = torch.tensor([row.own_length for row in rows], device=device)
        self._longest = max(row.own_length for row in rows)
        self.positions = torch.tensor([row.length - 1 for row in rows], device=device)  # [B]
        self.where = torch.arange(len(rows), device=device) * caches.own.tokens + self._own - 1  # [B]
        self._prefixes = _SharedPrefixes(rows, device) if any(row.prefix for row in rows) else None
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """Queries `[B, heads, D]` -> `[B, heads, value dim]`."""
        keys, values = self._caches.own.read(layer, len(q), self._longest)
        # The query heads of a key head are one block, so keys are read once and never repeated.
        folded = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
        if window not in self._masks:
            first_own = self.positions - (self._own - 1)
            self._masks[window] = _mask(self._own, self._longest, self.positions, first_own, window, q.dtype)[
                :, None, None
            ]
        out, lse = attention(folded, keys, values, self._masks[window], scale)
        if self._prefixes is not None:
            keys, values = self._caches.prefixes.read(layer, self._prefixes.slots, self._prefixes.longest)
            out = self._prefixes.join(folded, keys, values, out, lse, self.positions, scale, window)
        return out.reshape(len(q), q.shape[1], -1)


class _SharedPrefixes:
    """Which rows share which slot of the prefix cache."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        groups: dict[int, list[int]] = {}
        lengths: dict[int, int] = {}
        for i, row in enumerate(rows):
            if row.prefix is not None:
                groups.setdefault(row.prefix.slot, []).append(i)
                lengths[row.prefix.slot] = row.prefix.length
        self.slots = max(groups) + 1
        self.longest = max(lengths.values())
        width = max(map(len, groups.values()))
        members = torch.zeros(self.slots, width, dtype=torch.long)
        place = torch.zeros(len(rows), dtype=torch.long)
        for slot, group in groups.items():
            members[slot, : len(group)] = torch.tensor(group)
            place[group] = torch.arange(len(group)) + slot * width
        self._members = members.to(device)  # [slots, width] -> row; what no row fills is computed and not looked at
        self._place = place.to(device)  # [B] -> into [slots * width]
        self._shares = torch.tensor([row.prefix is not None for row in rows], device=device)
        # A slot without rows counts as one token long: a softmax over nothing is NaN.
        self._lengths = torch.tensor([lengths.get(slot, 1) for slot in range(self.slots)], device=device)
        self._masks: dict[int | None, Tensor] = {}

    def join(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        own: Tensor,
        own_lse: Tensor,
        positions: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Add the prefixes' part to the rows' own: `own [B, kv_heads, fold, D]`, `own_lse [B, kv_heads, fold]`."""
        slots, width = self._members.shape
        _, kv_heads, fold, dim = q.shape
        gathered = q[self._members].transpose(1, 2).reshape(slots, kv_heads, width * fold, dim)
        if window not in self._masks:
            lengths = self._lengths[:, None].expand(slots, width).flatten()
            seen_from = positions[self._members].flatten()
            mask = _mask(lengths, self.longest, seen_from, torch.zeros_like(lengths), window, q.dtype)
            if window is None:
                mask = mask.view(slots, width, -1)[:, :1]
            else:
                mask = mask.repeat_interleave(fold, dim=0).view(slots, width * fold, -1)
            self._masks[window] = mask[:, None]
        out, lse = attention(gathered, keys, values, self._masks[window], scale)
        out = out.view(slots, kv_heads, width, fold, -1).transpose(1, 2).flatten(0, 1)[self._place]
        lse = lse.view(slots, kv_heads, width, fold).transpose(1, 2).flatten(0, 1)[self._place]
        joins = self._shares
        if window is not None:
            joins = joins & (positions - window + 1 < self._lengths[self._place // width])
        weight = torch.where(joins[:, None, None], torch.sigmoid(lse - own_lse), 0.0)
        return torch.lerp(own, out, weight[..., None].to(own.dtype))


def _mask(
    lengths: Tensor, longest: int, positions: Tensor, first: Tensor, window: int | None, dtype: torch.dtype
) -> Tensor:
    """What each query may see of keys that start at position `first`: 0 or -inf, `[queries, longest]`."""
    index = torch.arange(longest, device=lengths.device)
    hidden = index >= lengths[:, None]
    if window is not None:
        hidden |= index + first[:, None] <= positions[:, None] - window
        # A query that sees nothing here looks at the first key, and its result gets the weight 0.
        hidden[:, 0] &= ~hidden.all(-1)
    # The GPU's kernel wants rows that start at a multiple of 16 bytes.
    room = torch.zeros(len(hidden), -(-longest // 8) * 8, dtype=dtype, device=lengths.device)
    return room[:, :longest].masked_fill_(hidden, float("-inf"))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention with an additive mask: `[B, H, Q, D]` -> the same, and the scores' log-sum-exp `[B, H, Q]` float32."""
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        # What scaled_dot_product_attention calls itself; it does not hand out the log-sum-exp.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
    aligned = all(stride % 8 == 0 for stride in (*mask.stride()[:-1], q.shape[-1], v.shape[-1]))
    if q.is_cuda and aligned:
        bias = mask.expand(*q.shape[:3], k.shape[2])
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
        return out, lse[..., : q.shape[2]]
    scores = (q @ k.transpose(-1, -2)).float() * scale + mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse
