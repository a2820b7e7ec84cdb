"""What came out of a run, as plain data: for `summary.json` and for the table at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

from .api import Alarm, Row

Status = Literal["finished", "interrupted", "stopped", "failed"]

# Metrics of the table at the end, in its order.
COMPARED = (
    "reward/mean",
    "rollout/length_mean",
    "rollout/truncated",
    "rollout/entropy",
    "actor/kl_ref",
    "critic/explained_variance",
    "throughput/tokens_per_second",
    "time/step",
)
HELD_OUT = ("eval/score", "eval/pass@1")


def summarise(
    rows: Sequence[Row], status: Status, seconds: float, alarms: Sequence[Alarm] = (), span: int | None = None
) -> dict[str, Any]:
    """Return first against last steps, held-out before against after, and what the run took.

    Args:
        rows: The rows of all steps, oldest first.
        status: `finished`, `interrupted` (by the user), `stopped` (by an alarm) or `failed`.
        seconds: Wall time of this process.
        alarms: What was said.
        span: How many steps at each end are averaged; left out: a tenth of the run, 1 to 10.

    Example:
        Rewards 0, 1, 2, 3 with span 2: `compared["reward/mean"]` is `{"first": 0.5, "last": 2.5}`.
    """
    steps = [row for row in rows if row.get("step", 0) > 0]
    span = span or max(1, min(10, len(steps) // 10))
    compared = {
        name: {"first": fmean(values[:span]), "last": fmean(values[-span:])}
        for name in COMPARED
        if (values := _finite(steps, name))
    }
    held_out: dict[str, dict[str, float]] = {}
    for name in HELD_OUT:
        known = [row for row in rows if math.isfinite(row.get(name, math.nan))]
        if known:
            held_out[name] = {"trained": known[-1][name], "trained_step": int(known[-1]["step"])}
            if known[0]["step"] == 0:
                held_out[name]["base"] = known[0][name]
    return {
        "status": status,
        "steps": int(steps[-1]["step"]) if steps else 0,
        "seconds": round(seconds, 1),
        "span": span,
        "compared": compared,
        "held_out": held_out,
        "alarms": [alarm.code for alarm in alarms],
    }


def _finite(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]
