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
        self._error: Exception | None = None
        self.failing = False
        """`fail` was called, and what it was given is not raised yet."""
        self._deferred = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signalled, self._failed = asyncio.Event(), asyncio.Event()
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
        self._loop = asyncio.get_running_loop()

    def check_failed(self) -> None:
        """Raise what `fail` was given, once: what ends the run after that may wait again."""
        if self.failing:
            self.failing = False
            assert self._error is not None
            raise self._error

    def check(self) -> None:
        """Raise Interrupted when a signal came, or what `fail` was given."""
        self.check_failed()
        if self.requested:
            raise Interrupted

    def fail(self, error: Exception) -> None:
        """Have the run end with an error, from whatever thread: it is raised where the run waits next, or waits now."""
        self._error, self.failing = error, True
        self._wake(self._failed)
        self._wake(self._signalled)

    async def unless_requested(self, work: Awaitable[T]) -> T:
        """Await `work`, but give it up as soon as a signal comes.

        Raises:
            Interrupted: A signal came first; `work` is cancelled and has ended.
            Exception: What `fail` was given.
        """
        self.check()
        return await self._unless(work, self._signalled)

    async def unless_failed(self, work: Awaitable[T]) -> T:
        """Await `work`, but give it up as soon as `fail` is called; a signal waits until it is done.

        Raises:
            Exception: What `fail` was given; `work` is cancelled and has ended.
        """
        return await self._unless(work, self._failed)

    async def _unless(self, work: Awaitable[T], event: asyncio.Event) -> T:
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.check()
            raise Interrupted
        finally:
            for future in (task, waiter):
                future.cancel()
            await asyncio.gather(task, waiter, return_exceptions=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self._deferred:
            raise KeyboardInterrupt
        self.requested = True
        self._wake(self._signalled)

    def _wake(self, event: asyncio.Event) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(event.set)
