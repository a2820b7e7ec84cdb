"""Keys and values of the running rows, a slot a row, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .scheduler import Move, Plan, Prefill

_ROUND = 64  # tokens; capacity grows in these, and at least by doubling


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """The rows' own slots, and the prompts that several rows share."""

    own: KvCache
    prefixes: KvCache

    @staticmethod
    def empty() -> Caches:
        """Caches that hold no memory yet."""
        return Caches(KvCache(), KvCache())

    def reserve(self, plan: Plan) -> None:
        """Make room for what a plan stores."""
        rows = [*((slot + 1, row.own_length) for slot, row in enumerate(plan.decode)), *_extents(plan.prefills)]
        for cache, extents in ((self.own, rows), (self.prefixes, _extents(plan.prefixes))):
            if extents:
                slots, tokens = zip(*extents, strict=True)
                cache.reserve(max(slots), max(tokens))


def _extents(prefills: Sequence[Prefill]) -> list[tuple[int, int]]:
    return [(prefill.slot + 1, len(prefill.tokens)) for prefill in prefills]


class KvCache:
    """One tensor `[slots, tokens, kv_heads, head_dim]` a layer for keys and one for values.

    Tokens lie before heads, so that a new token is one contiguous write per row. Memory is taken at the first write of
    a layer, with the heads and dtype that the model brings, and doubles when a row outgrows it.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.tokens = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, slots: int, tokens: int) -> None:
        """Make room for so many slots of so many tokens; what is cached stays."""
        if slots <= self.slots and tokens <= self.tokens:
            return
        old_slots, old_tokens = self.slots, self.tokens
        if slots > self.slots:
            self.slots = max(slots, 2 * old_slots)
        if tokens > self.tokens:
            self.tokens = -(-max(tokens, 2 * old_tokens) // _ROUND) * _ROUND
        for layer, (keys, values) in self._layers.items():
            grown = self._allocate(keys), self._allocate(values)
            grown[0][:old_slots, :old_tokens] = keys
            grown[1][:old_slots, :old_tokens] = values
            self._layers[layer] = grown

    def write(self, layer: int, where: Tensor, key: Tensor, value: Tensor) -> None:
        """Store tokens. `where [T]` = slot * self.tokens + position; key and value are `[kv_heads, T, head_dim]`."""
        new_key, new_value = key.transpose(0, 1), value.transpose(0, 1)
        if layer not in self._layers:
            self._layers[layer] = self._allocate(new_key), self._allocate(new_value)
        keys, values = self._layers[layer]
        keys.flatten(0, 1).index_copy_(0, where, new_key)
        values.flatten(0, 1).index_copy_(0, where, new_value)

    def read(self, layer: int, slots: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The first tokens of the first slots, as views `[slots, kv_heads, tokens, head_dim]`."""
        keys, values = self._layers[layer]
        return keys[:slots, :tokens].transpose(1, 2), values[:slots, :tokens].transpose(1, 2)

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy between slots, all at once. No slot may be both a source and a target."""
        # The longest of them for all: what lies behind a row's own tokens is never read.
        length = max((move.length for move in moves), default=0)
        if not length:
            return
        device = next(iter(self._layers.values()))[0].device
        source = torch.tensor([move.source for move in moves], device=device)
        target = torch.tensor([move.target for move in moves], device=device)
        for pair in self._layers.values():
            for store in pair:
                store[target, :length] = store[source, :length]

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.slots, self.tokens, *like.shape[-2:])
