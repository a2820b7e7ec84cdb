"""Thin adapters for trackers that live in packages of their own: wandb, mlflow, swanlab, trackio.

Each reads its own environment variables as its users know them (`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`,
`SWANLAB_MODE`, ...); offline, nothing is dialled.
"""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from ..records import Rollout
from .api import Alarm, Row, RunInfo
from .text import rollout_as_text


def require(package: str) -> Any:
    """Import a tracker's package. Raises UserError `tracker-missing-package` naming the extra to install."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        hint = f"pip install 'surefoot[{package}]'"
        raise UserError(
            "tracker-missing-package", f"{package} is not installed", key="tracking.trackers", hint=hint
        ) from None


class WandbTracker:
    """Weights & Biases. Alarms become alerts."""

    def __init__(self) -> None:
        self._wandb = require("wandb")

    def start(self, info: RunInfo) -> None:
        """Open or go on in the run `info.run_id`."""
        self._run = self._wandb.init(
            project=info.project,
            name=info.name,
            id=info.run_id,
            resume="allow",
            dir=str(info.folder),
            config=dict(info.config),
            # Its copy of stdout would hold every frame of the live display.
            settings=self._wandb.Settings(console="off"),
        )
        # wandb's own step can't go back; ours does when a run is resumed from before its last logged step.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Row) -> None:
        """Log all metrics of the step."""
        self._run.log({**metrics, "step": step})

    def sample(self, step: int, rollout: Rollout) -> None:
        """Log the rollout as preformatted text."""
        page = self._wandb.Html(f"<pre>{html.escape(rollout_as_text(rollout))}</pre>")
        self._run.log({"sample": page, "step": step})

    def alarm(self, alarm: Alarm) -> None:
        """Send an alert."""
        self._run.alert(title=alarm.code, text=f"step {alarm.step}: {alarm.message}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Upload the rest and close."""
        self._run.finish(exit_code=0 if summary.get("status") == "finished" else 1)


class MlflowTracker:
    """MLflow. The run is found again by its tag `surefoot.run_id`. Metrics are sent in the background."""

    def __init__(self) -> None:
        self._mlflow = require("mlflow")

    def start(self, info: RunInfo) -> None:
        """Open or go on in the run with our id."""
        experiment = self._mlflow.set_experiment(info.project)
        found = self._mlflow.search_runs(
            [experiment.experiment_id], f"tags.`surefoot.run_id` = '{info.run_id}'", max_results=1, output_format="list"
        )
        if found:
            self._mlflow.start_run(run_id=found[0].info.run_id)
            return
        self._mlflow.start_run(run_name=info.name, tags={"surefoot.run_id": info.run_id})
        self._mlflow.log_params({key: str(value)[:500] for key, value in _leaves(info.config)})

    def log(self, step: int, metrics: Row) -> None:
        """Log all metrics of the step. Names take `_` for characters that mlflow refuses."""
        values = {
            _mlflow_name(name): value for name, value in metrics.items() if name != "step" and not math.isnan(value)
        }
        self._mlflow.log_metrics(values, step=step, synchronous=False)

    def sample(self, step: int, rollout: Rollout) -> None:
        """Log the rollout as a text artifact."""
        self._mlflow.log_text(rollout_as_text(rollout), f"samples/step_{step:06d}.txt")

    def alarm(self, alarm: Alarm) -> None:
        """Set a tag."""
        self._mlflow.set_tag(alarm.code, f"step {alarm.step}: {alarm.message}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the rest and close."""
        self._mlflow.end_run("FINISHED" if summary.get("status") == "finished" else "FAILED")


class SwanlabTracker:
    """SwanLab."""

    def __init__(self) -> None:
        self._swanlab = require("swanlab")

    def start(self, info: RunInfo) -> None:
        """Open or go on in the run `info.run_id`."""
        self._run = self._swanlab.init(
            project=info.project,
            name=info.name,
            id=info.run_id,
            resume="allow",
            config=dict(info.config),
            log_dir=str(info.folder / "swanlab"),
        )

    def log(self, step: int, metrics: Row) -> None:
        """Log all metrics of the step."""
        self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=step)

    def sample(self, step: int, rollout: Rollout) -> None:
        """Log the rollout as text."""
        self._run.log({"sample": self._swanlab.Text(rollout_as_text(rollout))}, step=step)

    def alarm(self, alarm: Alarm) -> None:
        """Log the alarm as text."""
        self._run.log({alarm.code: self._swanlab.Text(alarm.message)}, step=alarm.step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the rest and close."""
        done = summary.get("status") == "finished"
        self._run.finish(state="success" if done else "aborted")


class TrackioTracker:
    """Trackio, which keeps its record on this machine."""

    def __init__(self) -> None:
        self._trackio = require("trackio")

    def start(self, info: RunInfo) -> None:
        """Open or go on in the run of this name and id."""
        self._run = self._trackio.init(
            project=info.project,
            name=f"{info.name}-{info.run_id}",
            resume="allow",
            config=dict(info.config),
            embed=False,
        )

    def log(self, step: int, metrics: Row) -> None:
        """Log all metrics of the step."""
        self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=step)

    def sample(self, step: int, rollout: Rollout) -> None:
        """Log the rollout as Markdown."""
        self._run.log({"sample": self._trackio.Markdown(f"```\n{rollout_as_text(rollout)}\n```")}, step=step)

    def alarm(self, alarm: Alarm) -> None:
        """Send an alert."""
        self._run.alert(title=alarm.code, text=alarm.message, step=alarm.step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close."""
        del summary
        self._run.finish()


def _leaves(tree: Any, key: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        return [(key, tree)]
    return [leaf for name, value in tree.items() for leaf in _leaves(value, f"{key}.{name}" if key else str(name))]


def _mlflow_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
