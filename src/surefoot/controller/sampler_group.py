"""The sampler's replicas as one engine: rows go where their prompt's other samples went, weights go to all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..rollout.api import Completion, Request, WeightSource
from .fanout import ask, ask_all


class SamplerGroup:
    """An `InferenceEngine` over replicas.

    Args:
        workers: Handles of `RolloutWorker` actors by name.
        logs: Folder with the processes' logs.
    """

    def __init__(self, workers: Mapping[str, Any], logs: Path | None = None) -> None:
        self._workers = dict(workers)
        self._logs = logs
        self._version = 0
        self._router = Router(list(self._workers))
        self._at: dict[str, str] = {}

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    async def generate(self, request: Request) -> Completion:
        """As `InferenceEngine.generate`; a replica that is gone is an error."""
        cost = len(request.token_ids) + request.sampling.max_response_length
        group = group_of(request.id)
        name = self._at[request.id] = self._router.enter(group, cost)
        try:
            return await ask(name, self._workers[name].generate.remote(request), self._logs)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                self._workers[name].abort.remote(request.id)
            raise
        finally:
            self._router.leave(group, cost)
            del self._at[request.id]

    async def abort(self, request_id: str) -> None:
        """As `InferenceEngine.abort`."""
        if (name := self._at.get(request_id)) is not None:
            await ask(name, self._workers[name].abort.remote(request_id), self._logs)

    def open_requests(self) -> dict[str, list[str]]:
        """Ids of requests that are not answered, by replica."""
        found: dict[str, list[str]] = {name: [] for name in self._workers}
        for request_id, name in list(self._at.items()):
            found[name].append(request_id)
        return found

    async def update_weights(self, source: WeightSource | None, version: int) -> None:
        """Bring new weights to all replicas, each bucket to all at once, and have each prove what it got.

        Raises:
            RunError: `weights-not-delivered`.
        """
        assert source is not None
        await self._all("begin_update")
        async for parcel in source.parcels():
            await self._all("load", parcel)
        await self._all("finish_update", version)
        self._version = version

    async def sleep(self, level: int = 1) -> None:
        """As `InferenceEngine.sleep`."""
        await self._all("sleep", level)

    async def wake(self, weights_only: bool = False) -> None:
        """Take memory again; with `weights_only` just enough to take new weights."""
        await self._all("wake", weights_only)

    async def close(self) -> None:
        """As `InferenceEngine.close`."""
        with contextlib.suppress(Exception):  # who is gone has nothing left to close
            await self._all("close")

    async def _all(self, method: str, *arguments: Any) -> None:
        calls = {name: getattr(w, method).remote(*arguments) for name, w in self._workers.items()}
        await ask_all(calls, self._logs)


class Router:
    """Which replica a row goes to: its prompt's, while that has open rows; else the one with the least to do.

    So that a prompt is computed once, whatever the number of its samples, and its cache is where they are.
    """

    def __init__(self, names: list[str]) -> None:
        self._load = dict.fromkeys(names, 0)
        self._groups: dict[str, tuple[str, int]] = {}  # group -> (replica, open rows)

    def enter(self, group: str, cost: int) -> str:
        """A row of a group comes; `cost` is in tokens. Returns the replica."""
        name, rows = self._groups.get(group) or (min(self._load, key=lambda n: self._load[n]), 0)
        self._groups[group] = (name, rows + 1)
        self._load[name] += cost
        return name

    def leave(self, group: str, cost: int) -> None:
        """A row of a group is done."""
        name, rows = self._groups.pop(group)
        if rows > 1:
            self._groups[group] = (name, rows - 1)
        self._load[name] -= cost


def group_of(request_id: str) -> str:
    """The prompt in a request's id, which is `prompt/sample/turn/seed`."""
    return request_id.rsplit("/", 3)[0]
