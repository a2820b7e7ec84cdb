"""The trackers by name. A new one is a class with the methods of `api.Tracker`, and a row here and in the config."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ..config.tracking import TrackerName
from .api import Tracker


def _lazy(module: str, name: str) -> Callable[[], Tracker]:
    """Return a factory that imports its module when it is called, and not before."""
    return lambda: getattr(importlib.import_module(f"surefoot.tracking.{module}"), name)()


TRACKERS: dict[TrackerName, Callable[[], Tracker]] = {
    "console": _lazy("console", "Console"),
    "tensorboard": _lazy("tensorboard", "TensorboardTracker"),
    "wandb": _lazy("hosted", "WandbTracker"),
    "mlflow": _lazy("hosted", "MlflowTracker"),
    "swanlab": _lazy("hosted", "SwanlabTracker"),
    "trackio": _lazy("hosted", "TrackioTracker"),
}
