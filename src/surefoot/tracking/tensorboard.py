"""Event files for TensorBoard, written without torch or TensorFlow."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from ..records import Rollout
from .api import Alarm, Row, RunInfo
from .text import rollout_as_text


class TensorboardTracker:
    """Writes scalars, alarms and sample rollouts to `RUN/tensorboard`. A resumed run hides the steps it makes again."""

    def start(self, info: RunInfo) -> None:
        """Open an event file."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(info.folder / "tensorboard"))
        if info.resumed_step is not None:
            # TensorBoard drops what it knows of this step and later ones when it reads a session start (status 1).
            self._add(info.resumed_step + 1, session_log=_proto("event_pb2").SessionLog(status=1))

    def log(self, step: int, metrics: Row) -> None:
        """Write one scalar a metric."""
        summary = _proto("summary_pb2").Summary
        scalars = {name: float(value) for name, value in metrics.items() if name != "step"}
        self._add(step, summary=summary(value=[summary.Value(tag=n, simple_value=v) for n, v in scalars.items()]))
        self._writer.flush()

    def sample(self, step: int, rollout: Rollout) -> None:
        """Write the rollout as text."""
        self._text(step, "sample", rollout_as_text(rollout))

    def alarm(self, alarm: Alarm) -> None:
        """Write the alarm as text."""
        self._text(alarm.step, "alarm", f"{alarm.code}: {alarm.message}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        del summary
        self._writer.close()

    def _text(self, step: int, tag: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        # Four spaces make it a code block: the plugin renders Markdown.
        block = "\n".join("    " + line for line in text.splitlines())
        self._add(step, summary=text_pb(tag, block))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(_proto("event_pb2").Event(wall_time=time.time(), step=step, **content))


def _proto(module: str) -> Any:
    # Generated code without types.
    return importlib.import_module(f"tensorboard.compat.proto.{module}")
