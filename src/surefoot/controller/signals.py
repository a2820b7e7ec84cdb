"""Interruption: the first signal ends the run at the next safe point with its state saved, the second at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from types import FrameType, TracebackType
from typing import Self, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The user or the scheduler asked the run to end; nothing is wrong with it."""


class StopSignal:
    """Catches SIGINT and SIGTERM while it is entered.

    Until `defer` is called a signal raises KeyboardInterrupt: there is no state to save yet. After that the first
    signal only sets `requested`, and wakes whoever waits in `unless_requested`.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def defer(self) -> None:
        """From here on there is state: wait for a safe point. Call within the running event loop."""
        self._deferred = True
        self._wake = (asyncio.get_running_loop(), asyncio.Event())

    def check(self) -> None:
        """Raise Interrupted when a signal came."""
        if self.requested:
            raise Interrupted

    async def unless_requested(self, work: Awaitable[T]) -> T:
        """Await `work`, but give it up as soon as a signal comes.

        Raises:
            Interrupted: A signal came first; `work` is cancelled and has ended.
        """
        assert self._wake is not None
        self.check()
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(self._wake[1].wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Interrupted
        finally:
            for future in (task, waiter):
                future.cancel()
            await asyncio.gather(task, waiter, return_exceptions=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self._deferred:
            raise KeyboardInterrupt
        self.requested = True
        if self._wake is not None:
            loop, event = self._wake
            loop.call_soon_threadsafe(event.set)
