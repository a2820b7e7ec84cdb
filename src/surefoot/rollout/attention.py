"""Attention of one step over packed tokens, through transformers' own cache and attention interfaces.

A step's tokens lie behind one another in one row `[1, T]`: first one token for each decoding row, which sees its
shared prefix and its slot, then the prompts to prefill, which see themselves. So linear layers hold no padding and
run once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from ..errors import UserError
from .cache import Caches
from .decode_attention import DecodeAttention
from .scheduler import Plan, Prefill

NAME = "surefoot_rollout"
_PADDING = 1.25  # prompts share a batch of the attention while it holds at most this multiple of their tokens


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt of the packed row: `length` tokens from `start`."""

    start: int
    length: int


class StepAttention:
    """One forward pass's `past_key_values` and attention.

    Args:
        plan: What the pass computes; its moves are done.
        caches: Room for it is reserved.
        device: Where the caches are.
    """

    def __init__(self, plan: Plan, caches: Caches, device: torch.device) -> None:
        self._caches = caches
        self._decode = DecodeAttention(plan.decode, caches, device) if plan.decode else None
        self._num_decode = len(plan.decode)
        prompts = [*plan.prefills, *plan.prefixes]
        segments: list[Segment] = []
        start = self._num_decode
        for prompt in prompts:
            segments.append(Segment(start, len(prompt.tokens)))
            start += len(prompt.tokens)
        self._batches = _batches(segments)
        inner = [torch.arange(len(prompt.tokens), device=device) for prompt in prompts]
        self.positions = torch.cat([*([self._decode.positions] if self._decode else []), *inner])  # [T]
        fed = [self._decode.where] if self._decode else []
        self._own_where = torch.cat([*fed, *_where(plan.prefills, caches.own.tokens, device)])
        self._prefix_where = torch.cat([*_where(plan.prefixes, caches.prefixes.tokens, device)])
        self._layer = -1

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """transformers' cache interface: store the new tokens `[1, kv_heads, T, head_dim]` of a layer."""
        own = len(self._own_where)
        self._caches.own.write(layer_idx, self._own_where, key[0, :, :own], value[0, :, :own])
        if len(self._prefix_where):
            self._caches.prefixes.write(layer_idx, self._prefix_where, key[0, :, own:], value[0, :, own:])
        self._layer = layer_idx
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """transformers' cache interface: positions are passed explicitly, so the past counts as empty."""
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention of the layer that was stored last: query `[1, heads, T, D]` -> `[1, T, heads, value dim]`."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        parts = [self._decode.attend(self._layer, q[: self._num_decode], scale, window)] if self._decode else []
        if not self._batches:
            return parts[0][None]
        out = torch.cat([*parts, q.new_empty(len(q) - self._num_decode, q.shape[1], v.shape[2])])
        for batch in self._batches:
            _prefill(batch, q, k, v, out, scale, window)
        return out[None]


def _where(prompts: Sequence[Prefill], tokens: int, device: torch.device) -> list[Tensor]:
    """Where a cache with so many tokens a slot keeps each prompt."""
    where = [torch.arange(len(p.tokens), device=device) + p.slot * tokens for p in prompts]
    return where or [torch.empty(0, dtype=torch.long, device=device)]


def _batches(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group prompts of like length, so that a batch holds little padding."""
    batches: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: (s.length, s.start)):
        if batches:
            tokens = sum(s.length for s in batches[-1]) + segment.length
            if (len(batches[-1]) + 1) * segment.length <= _PADDING * tokens:
                batches[-1].append(segment)
                continue
        batches.append([segment])
    return batches


def _prefill(batch: list[Segment], q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, window: int | None) -> None:
    """Causal attention of a batch of prompts within themselves, into `out`. Padding stands at the end, where no one looks."""
    device, width = q.device, batch[-1].length
    position = torch.arange(width, device=device)
    index = torch.tensor([s.start for s in batch], device=device)[:, None] + position
    real = position < torch.tensor([s.length for s in batch], device=device)[:, None]
    index.clamp_(max=len(q) - 1)
    qs, ks, vs = (x[index].transpose(1, 2) for x in (q, k, v))  # [prompts, heads, width, D]
    mask = None
    if window is not None and window < width:
        age = position[:, None] - position
        mask = torch.zeros(width, width, dtype=q.dtype, device=device).masked_fill_((age < 0) | (age >= window), float("-inf"))
    part = F.scaled_dot_product_attention(
        qs, ks, vs, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=qs.shape[1] != ks.shape[1]
    )
    out[index[real]] = part.transpose(1, 2)[real]


def rollout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    surefoot_step: StepAttention | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query `[1, heads, T, D]` -> `[1, T, heads, value dim]`."""
    assert surefoot_step is not None, "the rollout's attention is called with surefoot_step=StepAttention only"
    if softcap is not None:
        raise UserError("model-unsupported", "the model caps its attention scores, which is not computed here", key="model.path")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return surefoot_step.attend(query, key, value, scale, sliding_window), None


AttentionInterface.register(NAME, rollout_attention)
