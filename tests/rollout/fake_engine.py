"""An inference engine that answers from a script, for tests of what sits above the seam."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from surefoot.rollout.api import Completion, Request, WeightSource


@dataclass(eq=False)
class ScriptedEngine:
    """Says what `script(request)` returns, a token a turn of the event loop, and keeps every request it got.

    `delay(request)` turns pass before the first token, so completions come in an order of the test's choosing; `pace`
    seconds pass before each token.
    """

    script: Callable[[Request], Sequence[int]]
    eos_token_ids: Sequence[int] = ()
    delay: Callable[[Request], int] = lambda request: 0
    pace: float = 0.0
    version: int = 0
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._aborted: set[str] = set()
        self._awake = asyncio.Event()
        self._awake.set()

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        for _ in range(self.delay(request)):
            await asyncio.sleep(0)
        tokens: list[int] = []
        versions: list[int] = []
        ends = {*self.eos_token_ids, *request.sampling.stop_token_ids}
        script = self.script(request)
        reason = "length"
        while len(tokens) < request.sampling.max_response_length:
            await asyncio.sleep(self.pace)
            await self._awake.wait()
            if request.id in self._aborted:
                reason = "aborted"
                break
            tokens.append(script[len(tokens) % len(script)])
            versions.append(self.version)
            if tokens[-1] in ends:
                reason = "stop"
                break
        logprobs = np.full(len(tokens), -0.5, np.float32)
        return Completion(np.array(tokens, np.int32), logprobs, np.array(versions, np.int32), reason)

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def update_weights(self, source: WeightSource | None, version: int) -> None:
        self.version = version

    async def sleep(self, level: int = 1) -> None:
        self._awake.clear()

    async def wake(self) -> None:
        self._awake.set()

    async def close(self) -> None:
        pass
