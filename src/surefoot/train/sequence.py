"""Ulysses sequence parallelism (arXiv:2309.14509): several processes share the tokens of each packed batch.

Every layer works on this process's slice of the tokens, `[T / size]`. Around attention, and only there, the slices are
exchanged for heads: each process sees all tokens for its share of the heads. So attention needs no change, and no
process holds all activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError


@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroup:
    """The processes that share a row's tokens; this one is number `rank` of `size`."""

    group: dist.ProcessGroup
    size: int
    rank: int

    def bounds(self, tokens: int) -> tuple[int, int]:
        """This process's slice of `tokens` tokens, a multiple of `size`."""
        share = tokens // self.size
        return self.rank * share, (self.rank + 1) * share

    def to_heads(self, local: Tensor) -> Tensor:
        """`[T / size, heads, D]` -> `[T, heads / size, D]`. Fewer heads than processes are repeated first."""
        if local.shape[1] % self.size:
            local = local.repeat_interleave(self.size // local.shape[1], dim=1)
        return _Exchange.apply(local, self, True)  # type: ignore[no-any-return]

    def to_tokens(self, local: Tensor) -> Tensor:
        """`[T, heads / size, D]` -> `[T / size, heads, D]`."""
        return _Exchange.apply(local, self, False)  # type: ignore[no-any-return]

    def spread(self, local: Tensor, where: Tensor, count: int) -> Tensor:
        """Put each process's numbers `[n]` at their places in one vector `[count]` that all have."""
        return _Spread.apply(local, where, count, self)  # type: ignore[no-any-return]


def check_heads(config: Any, size: int) -> None:
    """Refuse a split that the model's heads don't allow.

    Raises:
        UserError: `placement.parallel.sequence` does not divide the heads.
    """
    text = config.get_text_config()
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads or text.num_attention_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise UserError(
            "config-conflict",
            "sequence parallelism gives each process an equal share of the attention heads",
            key="placement.parallel.sequence",
            got=f"{size} for {heads} query heads and {kv_heads} key heads",
            want=f"one of {fits}",
        )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, sequence: SequenceGroup, to_heads: bool) -> Tensor:
        ctx.sequence, ctx.to_heads = sequence, to_heads
        return _exchange(local, sequence, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _exchange(grad, ctx.sequence, not ctx.to_heads), None, None


def _exchange(local: Tensor, sequence: SequenceGroup, to_heads: bool) -> Tensor:
    tokens, heads, dim = local.shape
    size = sequence.size
    if to_heads:
        send = local.view(tokens, size, heads // size, dim).transpose(0, 1).contiguous()
    else:
        send = local.contiguous().view(size, tokens // size, heads, dim)
    got = torch.empty_like(send)
    dist.all_to_all_single(got, send, group=sequence.group)
    if to_heads:
        return got.view(size * tokens, heads // size, dim)
    return got.transpose(0, 1).reshape(tokens // size, size * heads, dim)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, where: Tensor, count: int, sequence: SequenceGroup) -> Tensor:
        ctx.save_for_backward(where)
        out = local.new_zeros(count)
        out[where] = local
        dist.all_reduce(out, group=sequence.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # The loss is the same on every process of the group and counts once: each takes its own places' gradient.
        (where,) = ctx.saved_tensors
        return grad[where], None, None, None
