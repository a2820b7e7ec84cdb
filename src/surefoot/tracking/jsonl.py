"""`metrics.jsonl`: one JSON object a step, the record that is always complete."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import UserError
from .files import naming_full_disk, write_atomic

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """Appends steps to `metrics.jsonl` and flushes each, so that a killed run has all steps that it finished.

    Steps after `resumed_step` are dropped when the file is opened: they are about to be made again. None drops all.
    `history` holds the rows kept, `dropped` counts the others.

    Raises:
        UserError: `metrics-unreadable`: a line is no row of metrics. Nothing is dropped then.
    """

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        self.path = path
        rows = read_metrics(path) if path.exists() else []
        self.history = tuple(row for row in rows if resumed_step is not None and row["step"] <= resumed_step)
        self.dropped = len(rows) - len(self.history)
        self._last_step = int(self.history[-1]["step"]) if self.history else -1
        self._begin(self.history)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step. Raises RunError `disk-full`."""
        assert step > self._last_step, f"step {step} comes after step {self._last_step}: each step is logged once"
        with naming_full_disk(self.path):
            self._file.write(to_line({"step": step} | dict(metrics)))
            self._file.flush()
        self._last_step = step

    def amend(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add to the last row, before any step is logged: what it lacked when the run was interrupted."""
        *before, last = self.history
        assert last["step"] == self._last_step, "a step was logged already"
        self.close()
        row = {**last, **metrics}
        self.history = (*before, row)
        self._begin(self.history)
        return row

    def _begin(self, rows: Sequence[Mapping[str, float]]) -> None:
        write_atomic(self.path, "".join(to_line(row) for row in rows))
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file; nothing is lost by not calling this."""
        # What a full disk refused is still buffered, and closing would raise for it a second time.
        with contextlib.suppress(OSError):
            self._file.close()


def to_line(row: Mapping[str, float]) -> str:
    """Return one line of strictly valid JSON. NaN and infinities become the strings `NaN`, `Infinity`, `-Infinity`."""
    return json.dumps({name: _plain(value) for name, value in row.items()}, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a `metrics.jsonl`. A line cut short by a crash or a full disk is left out.

    Raises:
        UserError: `metrics-unreadable`: a whole line is something else than a step's numbers.
    """
    rows: list[dict[str, float]] = []
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        row = _row_of(row)
        if row is None:
            raise UserError(
                "metrics-unreadable",
                f"line {number} is no step's metrics; something else than this run wrote there",
                key=str(path),
                got=line[:100],
                want='an object of numbers with a whole "step"',
                hint="Take the line out, or give this run another `name`.",
            )
        rows.append(row)
    return rows


def _row_of(value: Any) -> dict[str, float] | None:
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return None
    row: dict[str, Any] = {name: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for name, v in value.items()}
    return row if all(isinstance(v, int | float) for v in row.values()) else None


def _plain(value: float) -> float | int | str:
    number = int(value) if isinstance(value, (int, bool)) else float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
