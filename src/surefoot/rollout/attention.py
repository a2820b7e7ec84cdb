"""Attention of one step over packed tokens, through transformers' own cache and attention interfaces.

A step's tokens lie behind one another in one row `[1, T]`: first one token for each decoding row, which sees its
shared prefix and its slot, then the prompts to prefill, which see themselves. So linear layers hold no padding and
run once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..errors import UserError
from .cache import Caches
from .decode_attention import DecodeAttention
from .prefill_attention import prefill_batches
from .scheduler import Plan, Prefill

NAME = "surefoot_rollout"


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
        self._prompts = prefill_batches([len(prompt.tokens) for prompt in prompts], self._num_decode, device)
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
        fed = self._decode.attend(self._layer, q[: self._num_decode], scale, window) if self._decode else None
        if not self._prompts:
            assert fed is not None
            return fed[None]
        out = q.new_empty(len(q), q.shape[1], v.shape[2])
        if fed is not None:
            out[: self._num_decode] = fed
        for batch in self._prompts:
            batch.attend(q, k, v, out, scale, window)
        return out[None]


def _where(prompts: Sequence[Prefill], tokens: int, device: torch.device) -> list[Tensor]:
    """Where a cache with so many tokens a slot keeps each prompt."""
    where = [torch.arange(len(p.tokens), device=device) + p.slot * tokens for p in prompts]
    return where or [torch.empty(0, dtype=torch.long, device=device)]


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
        raise UserError(
            "model-unsupported", "the model caps its attention scores, which is not computed here", key="model.path"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return surefoot_step.attend(query, key, value, scale, sliding_window), None


AttentionInterface.register(NAME, rollout_attention)
