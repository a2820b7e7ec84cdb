"""Attention over packed segments, through transformers' attention interface: no token sees another segment.

On CUDA in half precision, torch's variable-length kernel; on the CPU and in float32, batches of segments of like
length through `scaled_dot_product_attention`, where only these small batches hold padding and no other layer does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from ..errors import UserError
from .packing import Pack
from .sequence import SequenceGroup

NAME = "surefoot_packed"
MASK_ELEMENTS = 1 << 22  # bounds the largest mask (and score matrix) of a batch


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """Segments of like length, as gathers out of the flat columns (index 0 fills up, and is masked)."""

    queries: Tensor  # [S, Q] into [T]
    keys: Tensor  # [S, K] into [T]
    mask: Tensor  # [S, 1, Q, K] bool, True = may see
    scatter: Tensor  # [n] positions in [T] ...
    source: Tensor  # [n] ... and where in [S * Q] their result is


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What the attention of one packed batch needs, built once and used by every layer."""

    key_index: Tensor | None
    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    padded: tuple[PaddedBatch, ...]
    sequence: SequenceGroup | None = None  # the queries, keys and values that come are slices of the tokens


def build_layout(pack: Pack, device: torch.device, dtype: torch.dtype, sequence: SequenceGroup | None = None) -> Layout:
    """Prepare a packed batch's attention for a device and the precision of its queries and keys."""
    query_lengths = (pack.cu_queries[1:] - pack.cu_queries[:-1]).tolist()
    key_lengths = (pack.cu_keys[1:] - pack.cu_keys[:-1]).tolist()
    varlen = device.type == "cuda" and dtype != torch.float32  # the kernel takes half precision only
    return Layout(
        key_index=None if pack.key_index is None else torch.from_numpy(pack.key_index).to(device).long(),
        cu_queries=torch.from_numpy(pack.cu_queries).to(device),
        cu_keys=torch.from_numpy(pack.cu_keys).to(device),
        max_queries=max(query_lengths),
        max_keys=max(key_lengths),
        padded=() if varlen else tuple(_padded_batches(pack, query_lengths, key_lengths, device)),
        sequence=sequence,
    )


def _padded_batches(
    pack: Pack, query_lengths: list[int], key_lengths: list[int], device: torch.device
) -> list[PaddedBatch]:
    """Batch segments of like length, so that little is padded and no mask is large."""
    order = sorted(range(len(query_lengths)), key=lambda s: (key_lengths[s], query_lengths[s], s))
    batches: list[list[int]] = []
    for s in order:
        last = batches[-1] if batches else None
        if last is not None:
            longest = max(query_lengths[s], max(query_lengths[i] for i in last))
            room = (len(last) + 1) * longest * key_lengths[s] <= MASK_ELEMENTS
            if (
                room
                and key_lengths[s] <= 1.5 * key_lengths[last[0]]
                and longest <= 2 * min(query_lengths[i] for i in [*last, s])
            ):
                last.append(s)
                continue
        batches.append([s])
    return [_padded_batch(pack, batch, query_lengths, key_lengths, device) for batch in batches]


def _padded_batch(
    pack: Pack, segments: list[int], query_lengths: list[int], key_lengths: list[int], device: torch.device
) -> PaddedBatch:
    width, depth = max(query_lengths[s] for s in segments), max(key_lengths[s] for s in segments)
    queries = torch.zeros(len(segments), width, dtype=torch.long)
    keys = torch.zeros(len(segments), depth, dtype=torch.long)
    mask = torch.zeros(len(segments), 1, width, depth, dtype=torch.bool)
    mask[..., 0] = True  # a filler query must see something, or its softmax is NaN
    scatter, source = [], []
    for i, s in enumerate(segments):
        q, k = query_lengths[s], key_lengths[s]
        where = torch.arange(int(pack.cu_queries[s]), int(pack.cu_queries[s + 1]))
        span = slice(int(pack.cu_keys[s]), int(pack.cu_keys[s + 1]))
        seen = where if pack.key_index is None else torch.from_numpy(pack.key_index[span]).long()
        queries[i, :q], keys[i, :k] = where, seen
        mask[i, 0, :q, :k] = torch.ones(q, k, dtype=torch.bool).tril(k - q)
        scatter.append(where)
        source.append(torch.arange(q) + i * width)
    return PaddedBatch(*(x.to(device) for x in (queries, keys, mask, torch.cat(scatter), torch.cat(source))))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query `[1, H, T, D]`, key and value `[1, KH, T, D]` -> `[1, T, H, D]`."""
    assert packed is not None, "the packed attention is called with packed=Layout only"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if packed.sequence is not None:
        q, k, v = (packed.sequence.to_heads(x) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if packed.padded:
        out = _attend_padded(q, k, v, packed, scale, sliding_window)
    else:
        out = _attend_varlen(q, k, v, packed, scale, sliding_window)
    if packed.sequence is not None:
        out = packed.sequence.to_tokens(out)
    return out.unsqueeze(0), None


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, packed: Layout, scale: float, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if packed.key_index is not None:
        k, v = k.index_select(0, packed.key_index), v.index_select(0, packed.key_index)
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        packed.cu_queries,
        packed.cu_keys,
        packed.max_queries,
        packed.max_keys,
        scale=scale,
        window_size=(window - 1 if window else -1, 0),
    )
    assert isinstance(out, Tensor)
    return out


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, packed: Layout, scale: float, window: int | None) -> Tensor:
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    fold = heads // kv_heads
    out = q.new_empty(tokens, heads, dim)
    for batch in packed.padded:
        rows, width = batch.queries.shape
        # The query heads of one key head become rows of one product: keys are read once, never repeated.
        qs = (
            q[batch.queries]
            .view(rows, width, kv_heads, fold, dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(rows, kv_heads, fold * width, dim)
        )
        ks, vs = k[batch.keys].transpose(1, 2), v[batch.keys].transpose(1, 2)
        mask = _windowed(batch.mask, window) if window else batch.mask
        mask = mask.expand(rows, fold, width, -1).reshape(rows, 1, fold * width, -1)
        part = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, scale=scale)
        part = part.view(rows, kv_heads, fold, width, dim).permute(0, 3, 1, 2, 4).reshape(rows * width, heads, dim)
        out = out.index_copy(0, batch.scatter, part[batch.source])
    return out


def _windowed(mask: Tensor, window: int) -> Tensor:
    """Hide keys more than `window - 1` places before the query. The last true key of a query is the query itself."""
    keys = torch.arange(mask.shape[-1], device=mask.device)
    own = mask.long().cumsum(-1).argmax(-1, keepdim=True)
    return mask & (keys > own - window)


def check_supported(config: Any) -> None:
    """Refuse architectures whose logits or attention need a term that is not computed here.

    Raises:
        UserError: The model caps its attention or output logits, or scales its logits.
    """
    text = config.get_text_config()
    for field in ("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling", "logit_scale"):
        value = getattr(text, field, None)
        if value not in (None, 1, 1.0):
            raise UserError(
                "model-unsupported",
                f"the architecture {text.model_type!r} sets `{field}`, which is not computed here",
                key="model.path",
                got=f"{field}: {value}",
                want="a dense decoder such as Llama, Qwen2, Qwen3, Mistral, Phi or SmolLM",
            )


AttentionInterface.register(NAME, packed_attention)
