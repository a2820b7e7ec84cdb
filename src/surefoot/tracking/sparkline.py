"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """Return one bar character per value; more than `width` values are averaged into `width` buckets.

    Values that are NaN or infinite leave a gap. A flat curve lies at the bottom.

    Example:
        sparkline([0, 1, 2, 7]) == "▁▂▃█"
    """
    buckets = _buckets(values, width)
    known = [v for v in buckets if v is not None]
    if not known:
        return " " * len(buckets)
    low, span = min(known), max(known) - min(known)
    scale = (len(BARS) - 1) / span if span > 0 and math.isfinite(span) else 0.0
    # A span below the smallest normal number makes the scale infinite: that curve is flat too.
    scale = scale if math.isfinite(scale) else 0.0
    return "".join(" " if v is None else BARS[min(len(BARS) - 1, round((v - low) * scale))] for v in buckets)


def _buckets(values: Sequence[float], width: int) -> list[float | None]:
    """Average `values` into at most `width` buckets of nearly equal size; None where no value is finite."""
    count = min(width, len(values))
    buckets: list[float | None] = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        finite = [v for v in part if math.isfinite(v)]
        buckets.append(math.fsum(v / len(finite) for v in finite) if finite else None)
    return buckets
