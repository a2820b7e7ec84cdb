"""Rows -> flat columns. Pure: which rows share a forward pass, and where each token lies in it.

A packed batch holds *segments* behind one another: no padding. Samples of one prompt may share it: the prompt is a
segment of its own, computed once, and each response is a segment whose attention sees the prompt's keys before its
own (a tree of depth one). The sum of gradients that flows back into the shared prompt is exactly the sum over the
samples, so sharing changes the cost and not the result.

The last token of a row predicts nothing that is trained, so it is never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..records import Ints, Mask


class Row(Protocol):
    """What packing needs to know of a row; `records.Sample` is one."""

    @property
    def group(self) -> str: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def token_ids(self) -> Ints: ...
    @property
    def loss_mask(self) -> Mask: ...


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Where everything lies in one packed batch. Positions are indices into the flat columns `[T]`.

    Example:
        Two samples [p q | a b] and [p q | c] of the prompt [p q], shared: token_ids = [p q a], the segments are
        [p q] and [a]; b and c are predicted only, never computed. predict = [1, 2, 1] (q, a, q), targets = [a, b, c].
    """

    rows: tuple[int, ...]  # index of each row in the caller's list, in packing order
    token_ids: Ints  # [T]
    position_ids: Ints  # [T]
    cu_queries: Ints  # [segments + 1]
    cu_keys: Ints  # [segments + 1]
    key_index: Ints | None  # [sum of key lengths] into [T]; None when every segment sees just itself
    predict: Ints  # [N], the position whose hidden state predicts model token n
    targets: Ints  # [N], the model tokens
    cu_model: Ints  # [rows + 1], bounds of each row's model tokens in [N]

    @property
    def num_tokens(self) -> int:
        """T: how many tokens the model computes."""
        return len(self.token_ids)


def plan_packs(
    rows: Sequence[Row], max_tokens: int, share_prefixes: bool = True, ranks: int = 1
) -> list[list[list[int]]]:
    """Split rows into balanced packs of at most `max_tokens` computed tokens, equally many for every rank.

    Rows of one group stay together where they fit and where no rank is left without work, so that their prompt is
    computed once. A row that is longer than the budget gets a pack of its own. Deterministic.

    Returns:
        For each rank its packs, as indices of rows. A pack may be empty: the rank has nothing to compute while others
        do, and runs a filler in its place, because the collectives of a sharded model count passes.
    """
    units: list[list[int]] = []
    room = min(max_tokens, -(-_cost_of_groups(rows, share_prefixes) // ranks))
    for members in _groups(rows, share_prefixes):
        unit: list[int] = []
        for index in members:
            if unit and _cost(rows, [*unit, index], share_prefixes) > room:
                units.append(unit)
                unit = []
            unit.append(index)
        units.append(unit)
    costs = [_cost(rows, unit, share_prefixes) for unit in units]
    order = sorted(range(len(units)), key=lambda u: (-costs[u], u))
    most = max(1, -(-len(units) // ranks))
    cells = min(most, max(1, -(-sum(costs) // (max_tokens * ranks))))
    while True:
        bins: list[list[int]] = [[] for _ in range(cells * ranks)]
        load = [0] * len(bins)
        for u in order:
            lightest = min(range(len(bins)), key=lambda b: (load[b], b))
            bins[lightest].append(u)
            load[lightest] += costs[u]
        if max(load) <= max_tokens or cells == most:
            break
        cells += 1
    packs = [sorted(i for u in sorted(members) for i in units[u]) for members in bins]
    return [[packs[b] for b in mine] for mine in _deal(load, ranks)]


def _deal(load: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal bins to ranks, equally many each: passes that run at the same time are alike, and so are the ranks' sums."""
    if ranks == 1:
        return [list(range(len(load)))]
    order = sorted(range(len(load)), key=lambda b: (-load[b], b))
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        # Back and forth: whoever got the heaviest of this round gets the lightest of the next.
        turn = range(ranks) if (start // ranks) % 2 == 0 else reversed(range(ranks))
        for rank, b in zip(turn, order[start : start + ranks], strict=True):
            hands[rank].append(b)
    return hands


def pack(rows: Sequence[Row], indices: Sequence[int], share_prefixes: bool = True) -> Pack:
    """Lay the rows named by `indices` behind one another."""
    order: list[int] = []
    ids: list[Ints] = []
    positions: list[Ints] = []
    predict: list[Ints] = []
    targets: list[Ints] = []
    keys: list[Ints] = []
    queries_end, keys_end, model_end = [0], [0], [0]
    total = 0
    shared = False

    def segment(tokens: Ints, start: int, prefix: Ints) -> Ints:
        nonlocal total
        own = np.arange(total, total + len(tokens), dtype=np.int32)
        ids.append(tokens)
        positions.append(np.arange(start, start + len(tokens), dtype=np.int32))
        keys.append(np.concatenate([prefix, own]))
        total += len(tokens)
        queries_end.append(total)
        keys_end.append(keys_end[-1] + len(prefix) + len(own))
        return own

    nothing = np.empty(0, np.int32)
    for members in _groups([rows[i] for i in indices], share_prefixes):
        first = rows[indices[members[0]]]
        cut = first.prompt_length if len(members) > 1 else 0
        prefix = segment(first.token_ids[:cut], 0, nothing) if cut else nothing
        shared = shared or cut > 0
        for member in members:
            row = rows[indices[member]]
            body = row.token_ids[cut:-1]
            own = segment(body, cut, prefix) if len(body) else nothing
            where = np.concatenate([prefix, own])
            chosen = np.flatnonzero(row.loss_mask)
            order.append(indices[member])
            predict.append(where[chosen - 1])
            targets.append(row.token_ids[chosen])
            model_end.append(model_end[-1] + len(chosen))
    return Pack(
        rows=tuple(order),
        token_ids=np.concatenate(ids),
        position_ids=np.concatenate(positions),
        cu_queries=np.array(queries_end, np.int32),
        cu_keys=np.array(keys_end, np.int32),
        key_index=np.concatenate(keys) if shared else None,
        predict=np.concatenate(predict).astype(np.int32),
        targets=np.concatenate(targets).astype(np.int32),
        cu_model=np.array(model_end, np.int32),
    )


def padded(packed: Pack, multiple: int) -> Pack:
    """Make the number of tokens a multiple, by a segment at the end that nothing sees and that predicts nothing."""
    missing = -packed.num_tokens % multiple
    if not missing:
        return packed
    fill = np.arange(missing, dtype=np.int32)
    keys = packed.key_index
    return replace(
        packed,
        token_ids=np.concatenate([packed.token_ids, np.zeros_like(fill)]),
        position_ids=np.concatenate([packed.position_ids, fill]),
        cu_queries=np.append(packed.cu_queries, packed.cu_queries[-1] + np.int32(missing)),
        cu_keys=np.append(packed.cu_keys, packed.cu_keys[-1] + np.int32(missing)),
        key_index=None if keys is None else np.concatenate([keys, fill + np.int32(packed.num_tokens)]),
    )


def filler() -> Pack:
    """One token that predicts another: what a rank computes while it has nothing to compute. It belongs to no row."""
    zero, one = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    return Pack((), zero, zero, one, one, None, zero, zero, np.zeros(1, np.int32))


def _groups(rows: Sequence[Row], share_prefixes: bool) -> list[list[int]]:
    """Rows that share a prompt, in order of first appearance; each row alone when nothing is shared."""
    if not share_prefixes:
        return [[i] for i in range(len(rows))]
    groups: dict[tuple[str, int, bytes], list[int]] = {}
    for i, row in enumerate(rows):
        # The ids are compared, not the group's name alone: a program may give its samples different prompts.
        head = np.ascontiguousarray(row.token_ids[: row.prompt_length]).tobytes()
        groups.setdefault((row.group, row.prompt_length, head), []).append(i)
    return list(groups.values())


def _cost_of_groups(rows: Sequence[Row], share_prefixes: bool) -> int:
    return sum(_cost(rows, members, share_prefixes) for members in _groups(rows, share_prefixes))


def _cost(rows: Sequence[Row], members: Sequence[int], share_prefixes: bool) -> int:
    """Tokens that the model computes for these rows of one group."""
    lengths = [len(rows[i].token_ids) - 1 for i in members]
    if share_prefixes and len(members) > 1:
        prompt = rows[members[0]].prompt_length
        return prompt + sum(length - prompt for length in lengths)
    return sum(lengths)
