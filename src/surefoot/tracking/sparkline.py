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
    if not 0 < span < math.inf:
        return "".join(" " if v is None else BARS[0] for v in buckets)
    return "".join(" " if v is None else BARS[round((v - low) / span * (len(BARS) - 1))] for v in buckets)


def _buckets(values: Sequence[float], width: int) -> list[float | None]:
    """Average `values` into at most `width` buckets of nearly equal size; None where no value is finite."""
    count = min(width, len(values))
    buckets: list[float | None] = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        finite = [v for v in part if math.isfinite(v)]
        buckets.append(math.fsum(v / len(finite) for v in finite) if finite else None)
    return buckets
