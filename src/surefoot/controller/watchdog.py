"""Nothing hangs: a run in which nothing happens for too long says who waits for whom, and ends.

What happens is said by `beat`: a phase begins or ends, a rollout is done, a process makes progress. When there was no
beat for `limit` seconds, the report of everyone who can be asked is shown and the run is made to fail wherever it
waits, so that it ends as on any failure: with the state of the last whole step saved. A process that does not even get
there is ended from outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from ..errors import RunError
from .signals import StopSignal

GRACE = 60.0  # seconds to end by itself, after which it is ended
_FRAMES = 6  # of a stack, the innermost


class Watchdog:
    """Watches one run, from a thread of its own.

    Args:
        limit: Seconds without a beat; 0 never barks.
        stop: Ends the run.
        say: Shows a text to the user.
        now: The clock, in seconds.
    """

    def __init__(
        self, limit: float, stop: StopSignal, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit, self._stop, self._say, self._now = limit, stop, say, now
        self._last, self._phase = now(), "start-up"
        self._closed = threading.Event()
        self._seen: dict[str, int] = {}
        self.counters: Callable[[], Mapping[str, int]] = dict
        """Asks everyone how much was computed so far, by name; one that has grown since the last look is a beat."""
        self.report: Callable[[], Iterable[str]] = lambda: ()
        """Asks everyone what it is doing, as lines."""

    def __enter__(self) -> Self:
        if self._limit:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def check(self) -> None:
        """Raise what ends the run, if it is to end; for those who wait outside of the event loop."""
        self._stop.check_failed()

    def beat(self, phase: str | None = None) -> None:
        """Something happened; `phase` is what begins now."""
        self._last, self._phase = self._now(), phase or self._phase

    def look(self) -> bool:
        """Look once. Returns whether it barked."""
        silent = self._now() - self._last
        if silent < self._limit / 2:
            return False
        before, now = dict(self._seen), self.counters()
        self._seen.update(now)
        if any(now.get(name, count) != count for name, count in before.items()):
            self.beat()
            return False
        if silent < self._limit:
            return False
        self._bark(silent)
        return True

    def _bark(self, silent: float) -> None:
        """Say who waits for whom, and have the run end."""
        what = f"nothing happened for {silent:.0f} s in phase {self._phase!r}"
        try:
            lines = [line for line in self.report() if line]
        except Exception as error:
            lines = [f"nobody could be asked: {error}"]
        self._say("\n".join([f"stalled: {what}", *(f"    {line}" for line in lines)]))
        self.beat()
        self._stop.fail(
            RunError(
                "stalled", what, key="stall_limit", got=lines[0] if lines else None,
                hint="The lines above say who waits for what. If a phase may take so long, raise stall_limit.",
            )
        )  # fmt: skip

    def _watch(self) -> None:
        while not self._closed.wait(min(5.0, self._limit / 10)):
            if self.look() and not self._closed.wait(GRACE) and self._stop.failing:
                self._say(f"stalled: it does not end by itself either, so it is ended.\n{own_stacks()}")
                sys.stderr.flush()
                os._exit(3)


def own_stacks() -> str:
    """Where each thread of this process is, the innermost frames, without the asking thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    me = threading.get_ident()
    parts: list[str] = []
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        if ident == me:
            continue
        frames = traceback.extract_stack(frame)[-_FRAMES:]
        where = " < ".join(f"{f.name} ({os.path.basename(f.filename)}:{f.lineno})" for f in reversed(frames))
        parts.append(f"{names.get(ident, ident)}: {where}")
    return "\n".join(parts)


def stack_of(pid: int) -> str | None:
    """Where another process of this host is, by py-spy; None when that is not installed or may not look."""
    if (tool := shutil.which("py-spy")) is None:
        return None
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3, check=False)
    except subprocess.TimeoutExpired:
        return None
    return f"{pid}: {done.stdout.strip()}" if done.returncode == 0 else None
