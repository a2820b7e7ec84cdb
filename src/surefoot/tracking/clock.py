"""Where a step's time goes."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator


class PhaseClock:
    """Adds up the seconds of each phase of a step. Phases follow each other; a nested one belongs to the outer."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._start = now()
        self._seconds: dict[str, float] = defaultdict(float)
        self._open: str | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        outer, self._open = self._open, self._open or name
        start = self._now()
        try:
            yield
        finally:
            if outer is None:
                self._seconds[name] += self._now() - start
                self._open = None

    def lap(self) -> dict[str, float]:
        """End the step: return `time/NAME` of each phase, `time/other`, and `time/step`, in seconds; start anew."""
        end = self._now()
        total, known = end - self._start, sum(self._seconds.values())
        seconds = {f"time/{name}": value for name, value in self._seconds.items()}
        seconds |= {"time/other": max(0.0, total - known), "time/step": total}
        self._start, self._seconds = end, defaultdict(float)
        return seconds
