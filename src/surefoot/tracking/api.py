"""The seam between a run and whatever shows or stores its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ..records import Rollout

Row: TypeAlias = Mapping[str, float]
"""The metrics of one step by name, `step` among them."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that the user should look at now. `code` is explained in `errors.CODES`."""

    code: str
    step: int
    message: str


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker learns at the start.

    `run_id` stays the same when the run is resumed, so that a tracker goes on in its own record of it. `facts` are
    lines for people (model, data, device). `resumed_step` is the last step that is done already, None in a new run;
    `history` holds the rows up to it that this folder has, oldest first.
    """

    name: str
    project: str
    folder: Path
    run_id: str
    steps: int
    config: Mapping[str, Any]
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    history: tuple[Row, ...] = ()
    resumed_step: int | None = None


class Tracker(Protocol):
    """A tracker. What it raises in `start` stops the run; what it raises later only disables it."""

    def start(self, info: RunInfo) -> None:
        """Open the record of this run."""
        ...

    def log(self, step: int, metrics: Row) -> None:
        """Take the metrics of a step. Steps rise; step 0 is the evaluation before training."""
        ...

    def sample(self, step: int, rollout: Rollout) -> None:
        """Take one rollout to look at."""
        ...

    def alarm(self, alarm: Alarm) -> None:
        """Take an alarm; each code comes once a run."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the record. `summary` is what `summary.summarise` returned."""
        ...
