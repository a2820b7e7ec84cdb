"""`metrics.jsonl`: one JSON object a step, the record that is always complete."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from .files import naming_full_disk, write_atomic

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """Appends steps to `metrics.jsonl` and flushes each, so that a killed run has all steps that it finished.

    Steps after `resumed_step` are dropped when the file is opened: they are about to be made again. None drops all.
    `history` holds the rows kept, `dropped` counts the others.
    """

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        self.path = path
        rows = read_metrics(path) if path.exists() else []
        self.history = tuple(row for row in rows if resumed_step is not None and row["step"] <= resumed_step)
        self.dropped = len(rows) - len(self.history)
        write_atomic(path, "".join(to_line(row) for row in self.history))
        self._last_step = int(self.history[-1]["step"]) if self.history else -1
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step. Raises RunError `disk-full`."""
        assert step > self._last_step, f"step {step} comes after step {self._last_step}: each step is logged once"
        with naming_full_disk(self.path):
            self._file.write(to_line({"step": step} | dict(metrics)))
            self._file.flush()
        self._last_step = step

    def close(self) -> None:
        """Close the file; nothing is lost by not calling this."""
        # What a full disk refused is still buffered, and closing would raise for it a second time.
        with contextlib.suppress(OSError):
            self._file.close()


def to_line(row: Mapping[str, float]) -> str:
    """Return one line of strictly valid JSON. NaN and infinities become the strings `NaN`, `Infinity`, `-Infinity`."""
    return json.dumps({name: _plain(value) for name, value in row.items()}, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a `metrics.jsonl`. A line cut short by a crash or a full disk is left out."""
    rows: list[dict[str, float]] = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows.append({name: _NOT_FINITE[value] if isinstance(value, str) else value for name, value in row.items()})
    return rows


def _plain(value: float) -> float | int | str:
    number = int(value) if isinstance(value, (int, bool)) else float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
