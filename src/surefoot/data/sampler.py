"""Which prompts the next step takes: several weighted sources, each in whole epochs, resumable to the row."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import UserError
from ..seeds import derive_seed
from .load import PromptSet


@dataclass(slots=True, eq=False)
class _Cursor:
    """Where one source stands: `order` is the epoch's order of its rows, `held` the rows it still owes the epoch.

    A row is held when its turn comes in a batch that has it already from the epoch before.
    """

    start: int
    ids: Sequence[str]
    epoch: int = 0
    position: int = 0
    held: deque[int] = field(default_factory=deque)
    order: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class PromptSampler:
    """An endless, exact sequence of batches of prompt indices.

    Each source gives every row once per epoch of its own, and goes on to its next epoch within a batch; no batch
    holds a row twice. Shares follow the weights: after any number of prompts each source has given its share of them
    to within one prompt. (A source so small that a batch takes all its rows may lag by one more for that batch.)
    """

    def __init__(
        self,
        ids: Sequence[Sequence[str]],
        weights: Sequence[float],
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        names: Sequence[str] | None = None,
    ) -> None:
        """Start before the first batch.

        Args:
            ids: Prompt ids, source by source; indices count through all sources in this order.
            weights: Share of each source, relative to the others.
            prompts_per_step: Size of a batch.
            seed: The run's seed.
            shuffle: Take each epoch in a random order, not in the order of the rows.
            names: Names of the sources, for errors and `epochs`.

        Raises:
            UserError: `data-too-few` when a source has fewer rows than its share of one batch.
        """
        assert len(ids) == len(weights) > 0
        self._names = list(names or (f"source {i}" for i in range(len(ids))))
        starts = np.cumsum([0, *(len(part) for part in ids)]).tolist()
        self._cursors = [_Cursor(start, part) for start, part in zip(starts, ids, strict=False)]
        total = sum(Fraction(weight) for weight in weights)
        self._shares = [Fraction(weight) / total for weight in weights]
        self._given = [0] * len(ids)
        self._size, self._seed, self._shuffle = prompts_per_step, seed, shuffle
        self._check_sizes()
        self._identity = self._fingerprint()
        for source in range(len(ids)):
            self._begin_epoch(source)

    @classmethod
    def over(cls, prompts: PromptSet, prompts_per_step: int, seed: int, shuffle: bool = True) -> PromptSampler:
        """Return the sampler of a loaded prompt set; its indices point into `prompts.prompts`."""
        parts = prompts.sources
        ids = [[prompt.id for prompt in prompts.prompts[part.start : part.stop]] for part in parts]
        return cls(ids, [part.weight for part in parts], prompts_per_step, seed, shuffle, [part.name for part in parts])

    @property
    def epochs(self) -> dict[str, float]:
        """How often each source has been gone through."""
        return {
            name: cursor.epoch + (cursor.position - len(cursor.held)) / len(cursor.ids)
            for name, cursor in zip(self._names, self._cursors, strict=True)
        }

    def next_batch(self) -> list[int]:
        """Return the indices of the next `prompts_per_step` prompts, all different."""
        batch: dict[int, None] = {}
        taken = [0] * len(self._cursors)
        while len(batch) < self._size:
            source = self._next_source(taken)
            batch[self._next_row(source, batch)] = None
            taken[source] += 1
        return list(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the exact position as JSON-able values; a few numbers a source, whatever its size."""
        return {
            **self._identity,
            "given": list(self._given),
            "sources": [{"epoch": c.epoch, "position": c.position, "held": list(c.held)} for c in self._cursors],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: the next batches are those of the uninterrupted run. Batch size may differ.

        Raises:
            UserError: `data-changed` when the state is from other rows, weights, seed or order.
        """
        for key, (what, place) in _IDENTITY.items():
            want, got = state.get(key), self._identity[key]
            if want != got:
                message = f"the checkpoint was made with {what}, so its place in the data means nothing in this run"
                hint = "Resume with what the run began with, or start another run from the exported weights."
                raise UserError("data-changed", message, key=place, got=got, want=want, hint=hint)
        self._given = list(state["given"])
        for source, saved in enumerate(state["sources"]):
            cursor = self._cursors[source]
            cursor.epoch = saved["epoch"]
            self._begin_epoch(source)
            cursor.position, cursor.held = saved["position"], deque(saved["held"])

    def _fingerprint(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=16)
        for cursor in self._cursors:
            digest.update("\x1f".join(cursor.ids).encode("utf-8", "surrogatepass") + b"\x1e")
        return {
            "rows": f"{sum(len(c.ids) for c in self._cursors)} rows, {digest.hexdigest()}",
            "weights": [str(share) for share in self._shares],
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _check_sizes(self) -> None:
        for name, cursor, share in zip(self._names, self._cursors, self._shares, strict=True):
            need = math.ceil(share * self._size)
            if len(cursor.ids) < need:
                message = f"{name} has fewer prompts than one step takes from it; a step holds no prompt twice"
                hint = "Lower prompts_per_step or this source's weight, or add rows."
                raise UserError(
                    "data-too-few",
                    message,
                    key="train.prompts_per_step",
                    got=f"{len(cursor.ids)} prompts",
                    want=f"at least {need}",
                    hint=hint,
                )

    def _next_source(self, taken: list[int]) -> int:
        """Choose the source of the next prompt and count it.

        Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): of the sources that have fallen
        behind by 1/(2k-2), take the one that must come soonest. No source is ever off by more than 1 - 1/(2k-2).
        """
        count = len(self._shares)
        if count == 1:
            self._given[0] += 1
            return 0
        slack = Fraction(1, 2 * count - 2)
        time = sum(self._given) + 1
        behind = [share * time - given for share, given in zip(self._shares, self._given, strict=True)]
        free = [i for i in range(count) if taken[i] < len(self._cursors[i].ids)]
        eligible = [i for i in free if behind[i] >= slack] or [max(free, key=lambda i: behind[i])]
        source = min(eligible, key=lambda i: ((1 - slack - behind[i]) / self._shares[i], i))
        self._given[source] += 1
        return source

    def _next_row(self, source: int, batch: dict[int, None]) -> int:
        """Return the next row of a source, as an index into all prompts, that is not yet in the batch."""
        cursor = self._cursors[source]
        for index in cursor.held:
            if index + cursor.start not in batch:
                cursor.held.remove(index)
                return index + cursor.start
        while True:
            if cursor.position == len(cursor.ids):
                # Held rows are all in this batch: they would have been given above, were they not.
                assert not cursor.held
                cursor.epoch += 1
                self._begin_epoch(source)
            index = int(cursor.order[cursor.position])
            cursor.position += 1
            if index + cursor.start not in batch:
                return index + cursor.start
            cursor.held.append(index)

    def _begin_epoch(self, source: int) -> None:
        cursor = self._cursors[source]
        cursor.position = 0
        size = len(cursor.ids)
        if not self._shuffle:
            cursor.order = np.arange(size)
            return
        # Sorting by raw draws: the bit generator's stream is fixed for ever, that of numpy's `permutation` is not.
        draws = np.random.PCG64(derive_seed(self._seed, "data", source, cursor.epoch)).random_raw(size)
        cursor.order = np.argsort(draws, kind="stable")


_IDENTITY = {
    "rows": ("other rows", "data.sources"),
    "weights": ("other weights", "data.sources"),
    "seed": ("another seed", "seed"),
    "shuffle": ("another order", "data.shuffle"),
}
