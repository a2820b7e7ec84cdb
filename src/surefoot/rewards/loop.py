"""An event loop in a thread for rewards that wait on the network, and a thread that batches for reward models.

Neither stalls the controller's loop, in which rows are still being generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from .api import Outcome, RewardItem

Result = TypeVar("Result")

_BEAT_SECONDS = 0.1
_GATHER_SECONDS = 0.002  # Rows that are added together come in one after the other.


class LoopBlocked(Exception):
    """The loop has not run for too long: a coroutine on it computes or waits without awaiting."""


class LoopThread:
    """Runs coroutines from any event loop. One that blocks it is left behind: a new loop takes over."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds without a sign of life after which the loop counts as blocked."""
        self._patience = patience
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat = 0.0

    async def run(self, make: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run `make()` on the loop and return its result.

        Raises:
            LoopBlocked: The loop did not move for `patience` seconds.
        """
        loop = self._running()
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), loop))
        while True:
            await asyncio.wait({future}, timeout=self._patience / 4)
            if future.done():
                return future.result()
            if self._loop is not loop or time.monotonic() - self._beat > self._patience:
                with self._lock:
                    self._loop = None if self._loop is loop else self._loop
                raise LoopBlocked

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Run `last` on the loop and stop it. A blocked loop is left to end with the process."""
        loop = self._loop
        if loop is None:
            return

        async def end() -> None:
            if last is not None:
                await last()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        # Where this times out the loop is blocked; otherwise its beat stops it.
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), loop).result(5)
        self._loop = None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = loop = asyncio.new_event_loop()
                self._beat = time.monotonic()
                threading.Thread(target=self._serve, args=(loop,), name="reward-loop", daemon=True).start()
            return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        def beat() -> None:
            if self._loop is not loop:  # Closed, or given up as blocked.
                loop.stop()
                return
            self._beat = time.monotonic()
            loop.call_later(_BEAT_SECONDS, beat)

        loop.call_soon(beat)
        loop.run_forever()
        loop.close()


class BatchThread:
    """Calls a function of many items with as many as wait, so that rows that come one by one still share a batch."""

    def __init__(self, function: Callable[[list[RewardItem]], list[Outcome]], most: int) -> None:
        """`most`: the most items of one call."""
        self._function = function
        self._most = most
        self._waiting: queue.SimpleQueue[tuple[RewardItem, Future[Outcome]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="reward-model", daemon=True)
        self._thread.start()

    def submit(self, item: RewardItem) -> Future[Outcome]:
        """Have one item judged. The future raises what the function raises."""
        future: Future[Outcome] = Future()
        self._waiting.put((item, future))
        return future

    def close(self) -> None:
        """Finish what waits and stop."""
        self._waiting.put(None)
        self._thread.join(60)

    def _serve(self) -> None:
        while (entry := self._waiting.get()) is not None:
            batch = [entry]
            time.sleep(_GATHER_SECONDS)
            with contextlib.suppress(queue.Empty):
                while len(batch) < self._most:
                    if (entry := self._waiting.get_nowait()) is None:
                        self._waiting.put(None)
                        break
                    batch.append(entry)
            # From here on they cannot be cancelled; those that were already are left out.
            batch = [(item, future) for item, future in batch if future.set_running_or_notify_cancel()]
            try:
                outcomes = self._function([item for item, _ in batch])
            except BaseException as error:
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                future.set_result(outcome)
