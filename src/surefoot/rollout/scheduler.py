"""Which rows run in which slot, and what each step computes. Pure Python: no tensors, no clock, no event loop.

Every running row is in the same state: the keys and values of all its tokens but the last are cached, and the last
token is the next one to feed. A new row gets there by a prefill of its prompt without the last token; a row that was
preempted, by a prefill of its prompt and what it has generated. So there is one kind of decode step, and no logits
are ever kept.

Rows with equal prompts share one prefill: their prompt is cached once, in a slot of the prefix cache, and their own
slots hold what follows it. A prompt that only one row has lies in that row's own slot.

Running rows fill the slots 0 .. n-1 without a gap: when a row leaves, the last one takes its place.

Example:
    Eight samples of one prompt of 60 tokens, nothing running: the first plan prefills 59 tokens into prefix slot 0;
    every plan after it decodes eight rows, each with one token, two tokens, ... of its own.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt without its last token, cached once for the running rows that share it."""

    slot: int
    length: int
    version: int
    """Weights that computed it; rows that start under others don't share it."""
    members: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """A request on its way. `generated` grows; everything else about progress follows from it."""

    id: str
    prompt: tuple[int, ...]
    generated: list[int] = field(default_factory=list[int])
    slot: int | None = None
    """Where its own cache lies; None while it waits."""
    prefix: Prefix | None = None

    @property
    def length(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.prompt) + len(self.generated)

    @property
    def own_length(self) -> int:
        """How many of its tokens belong in its own slot: all that no shared prefix holds, the last one included."""
        return self.length - (self.prefix.length if self.prefix else 0)

    @property
    def last_token(self) -> int:
        """The token to feed next."""
        return self.generated[-1] if self.generated else self.prompt[-1]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `length` tokens of one slot to another."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """Compute the keys and values of `tokens`, from position 0, into a row's slot or a slot of the prefix cache."""

    slot: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step: first `moves`, then one forward pass over all the rest. `decode[i]` sits in slot i.

    No slot is both a source and a target of `moves`. Prefills have at least one token.
    """

    moves: list[Move]
    decode: list[Row]
    prefills: list[Prefill]
    prefixes: list[Prefill]


class Scheduler:
    """First come, first served, over a fixed number of slots.

    Args:
        max_rows: How many rows may run together. There are never more prefixes than rows.
        prefill_tokens: Most tokens that one step prefills, so that running rows don't wait long; a single longer
            prompt is taken alone.
    """

    def __init__(self, max_rows: int, prefill_tokens: int) -> None:
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self._waiting_prompts: Counter[tuple[int, ...]] = Counter()
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._free_prefix_slots = list(range(max_rows))

    def __bool__(self) -> bool:
        """Whether any row waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, row: Row) -> None:
        """Put a row at the end of the queue."""
        self.waiting.append(row)
        self._waiting_prompts[row.prompt] += 1

    def plan(self, version: int) -> Plan:
        """Say what the next step computes, and take waiting rows into free slots: they decode from the step after."""
        decode = list(self.running)
        moves: list[Move] = []
        for slot, row in enumerate(decode):
            if row.slot != slot:
                assert row.slot is not None
                moves.append(Move(row.slot, slot, row.own_length - 1))
                row.slot = slot
        prefills: list[Prefill] = []
        prefixes: list[Prefill] = []
        budget = self.prefill_tokens
        while self.waiting and len(self.running) < self.max_rows:
            row = self.waiting[0]
            shared = self._shareable(row, version)
            cost = 0 if shared else row.length - 1
            if cost > budget and budget < self.prefill_tokens:
                break
            budget -= cost
            self._forget_waiting(self.waiting.popleft())
            row.slot = len(self.running)
            self.running.append(row)
            if cost and not row.generated and self._waiting_prompts[row.prompt]:
                shared = self._new_prefix(row.prompt, version)
                prefixes.append(Prefill(shared.slot, row.prompt[:-1]))
            elif cost:
                prefills.append(Prefill(row.slot, (row.prompt + tuple(row.generated))[:-1]))
            if shared:
                row.prefix = shared
                shared.members += 1
        return Plan(moves, decode, prefills, prefixes)

    def retire(self, rows: Iterable[Row]) -> None:
        """Free the slots of running rows that are done; the last rows take the holes."""
        leaving = {id(row): row for row in rows}
        staying = len(self.running) - len(leaving)
        movers = [row for row in self.running[staying:] if id(row) not in leaving]
        for slot in range(staying):
            if id(self.running[slot]) in leaving:
                self.running[slot] = movers.pop()
        del self.running[staying:]
        for row in leaving.values():
            self._leave_prefix(row)

    def abort(self, row_id: str) -> Row | None:
        """Take a row out, waiting or running, and return it; None when there is no such row."""
        for row in self.waiting:
            if row.id == row_id:
                self.waiting.remove(row)
                self._forget_waiting(row)
                return row
        for row in self.running:
            if row.id == row_id:
                self.retire([row])
                return row
        return None

    def preempt(self) -> None:
        """Put all running rows back at the head of the queue, in slot order: their cache is gone."""
        rows = list(self.running)
        self.retire(rows)
        for row in rows:
            row.slot = None
            self._waiting_prompts[row.prompt] += 1
        self.waiting.extendleft(reversed(rows))

    def clear(self) -> list[Row]:
        """Forget all rows and return them."""
        self.preempt()
        rows = list(self.waiting)
        self.waiting.clear()
        self._waiting_prompts.clear()
        return rows

    def _shareable(self, row: Row, version: int) -> Prefix | None:
        prefix = None if row.generated else self._prefixes.get(row.prompt)
        return prefix if prefix and prefix.version == version else None

    def _new_prefix(self, prompt: tuple[int, ...], version: int) -> Prefix:
        prefix = Prefix(heapq.heappop(self._free_prefix_slots), len(prompt) - 1, version)
        self._prefixes[prompt] = prefix
        return prefix

    def _leave_prefix(self, row: Row) -> None:
        prefix, row.prefix = row.prefix, None
        if prefix is None:
            return
        prefix.members -= 1
        if prefix.members == 0:
            heapq.heappush(self._free_prefix_slots, prefix.slot)
            if self._prefixes.get(row.prompt) is prefix:
                del self._prefixes[row.prompt]

    def _forget_waiting(self, row: Row) -> None:
        self._waiting_prompts[row.prompt] -= 1
        if not self._waiting_prompts[row.prompt]:
            del self._waiting_prompts[row.prompt]
