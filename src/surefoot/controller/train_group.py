"""A train group: processes that hold one world of models together, with a train engine's methods on the controller.

Rows are planned for all processes at once, each gets its own and the packs to make of them; results come back in the
order of the rows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from ..algorithms.aggregate import Denominators
from ..config.train import TrainConfig
from ..records import Floats, Sample
from ..sync.parcel import Parcel
from ..train.api import Objective, Plan, UpdateReport, merge_reports
from ..train.packing import Row, plan_packs
from .fanout import ask_all, gather
from .memory import TrainMemory
from .preflight import Role


class TrainGroup:
    """The processes of one pool that train.

    Args:
        workers: Handles of `TrainWorker` actors by name, in the order of their ranks.
        train: Batch words and memory budget.
        sequence: How many neighbouring processes share each row.
        logs: Folder with the processes' logs.
        check: Called while it waits; what it raises ends the wait.
    """

    def __init__(
        self,
        workers: dict[str, Any],
        train: TrainConfig,
        sequence: int = 1,
        logs: Path | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.workers = workers
        self._train, self._sequence, self._logs, self._check = train, sequence, logs, check

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every process with the same arguments; results by rank.

        Raises:
            RunError: A process failed or died, naming it.
        """
        calls = {name: getattr(w, method).remote(*arguments) for name, w in self.workers.items()}
        return gather(calls, self._logs, self._check)

    def connect(self) -> None:
        """Let the processes find each other."""
        first = next(iter(self.workers))
        (endpoint,) = gather({first: self.workers[first].endpoint.remote()}, self._logs, self._check)
        self.call("connect", endpoint)

    def load(self, role: Role) -> GroupEngine:
        """Load one role's model on all processes."""
        facts = self.call("load", role)[0]
        return GroupEngine(self, role, facts["parameters"], facts["shapes"])

    def rehearse(self) -> list[TrainMemory]:
        """Measure every process's peak on the longest rows."""
        return self.call("rehearse")

    async def rest(self) -> None:
        """Give back what is needed only while computing."""
        await self._ask("rest")

    async def parcels(self) -> AsyncIterator[Parcel]:
        """As `WeightSource.parcels`: every process publishes for its own neighbours."""
        parts = await self._ask("first_parcel")
        while parts[0] is not None:
            yield parts[0].joined(parts[1:])
            parts = await self._ask("next_parcel")

    async def _ask(self, method: str) -> list[Any]:
        return await ask_all({name: getattr(w, method).remote() for name, w in self.workers.items()}, self._logs)

    def on_rows(self, method: str, role: Role, rows: Sequence[Any], *arguments: Any) -> list[tuple[list[int], Any]]:
        """Call a method with each process's rows, then the arguments, then its plan.

        Returns:
            Of each share of the data, once: the indices of its rows, and what came back.
        """
        plans = plan_packs(
            rows,
            self._train.max_tokens_per_microbatch,
            self._train.share_prefixes,
            ranks=len(self.workers) // self._sequence,
        )
        calls: dict[str, Any] = {}
        shares: list[list[int]] = []
        for rank, (name, worker) in enumerate(self.workers.items()):
            mine, plan = _localized(plans[rank // self._sequence])
            shares.append(mine)
            calls[name] = getattr(worker, method).remote(role, [rows[i] for i in mine], *arguments, plan)
        results = gather(calls, self._logs, self._check)
        return list(zip(shares, results, strict=True))[:: self._sequence]


class GroupEngine:
    """A `TrainEngine` over the processes of a group."""

    def __init__(
        self, group: TrainGroup, role: Role, parameters: tuple[int, int], shapes: dict[str, tuple[int, ...]]
    ) -> None:
        self.updates_done = 0
        self._group = group
        self._role: Role = role
        self._parameters, self._shapes = parameters, shapes

    def logprobs(self, rows: Sequence[Row], reference: bool = False) -> list[Floats]:
        """As `TrainEngine.logprobs`."""
        return _in_order(self._group.on_rows("logprobs", self._role, rows, reference), len(rows))

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """As `TrainEngine.values`."""
        return _in_order(self._group.on_rows("values", self._role, rows), len(rows))

    def update(self, samples: Sequence[Sample], objective: Objective, denominators: Denominators) -> UpdateReport:
        """As `TrainEngine.update`."""
        parts = self._group.on_rows("update", self._role, samples, objective, denominators)
        self.updates_done += 1
        return merge_reports(parts, len(samples))

    def skip_update(self) -> None:
        """As `TrainEngine.skip_update`."""
        self._group.call("skip_update", self._role)
        self.updates_done += 1

    def num_parameters(self) -> tuple[int, int]:
        """As `TrainEngine.num_parameters`."""
        return self._parameters

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `TrainEngine.trained_shapes`."""
        return self._shapes

    def save_weights(self, path: Path) -> None:
        """As `TrainEngine.save_weights`."""
        self._group.call("save_weights", self._role, path)

    def save_optimizer(self, path: Path) -> None:
        """As `TrainEngine.save_optimizer`."""
        self._group.call("save_optimizer", self._role, path)

    def load(self, weights: Path, optimizer: Path, updates_done: int) -> None:
        """As `TrainEngine.load`."""
        self._group.call("restore", self._role, weights, optimizer, updates_done)
        self.updates_done = updates_done


def _localized(plan: Plan) -> tuple[list[int], list[list[int]]]:
    """A plan over all rows -> the rows that it needs, and the same plan over these."""
    mine = [i for members in plan for i in members]
    place = {row: position for position, row in enumerate(mine)}
    return mine, [[place[i] for i in members] for members in plan]


def _in_order(parts: Sequence[tuple[list[int], list[Floats]]], count: int) -> list[Floats]:
    rows = {i: row for mine, numbers in parts for i, row in zip(mine, numbers, strict=True)}
    return [rows[i] for i in range(count)]
