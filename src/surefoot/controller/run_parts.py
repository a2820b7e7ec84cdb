"""A run that is ready to go: all its parts, as both loops take them."""

from __future__ import annotations

from dataclasses import dataclass

from ..tracking.hub import Trackers
from ..tracking.run_folder import RunFolder
from .parts import Engines, Progress
from .preflight import Preflight
from .resume import Saver
from .sampling import RolloutCollector
from .signals import StopSignal


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """All parts are up."""

    ready: Preflight
    engines: Engines
    collector: RolloutCollector
    trackers: Trackers
    folder: RunFolder
    saver: Saver
    stop: StopSignal
    progress: Progress
