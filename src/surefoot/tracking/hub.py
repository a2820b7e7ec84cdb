"""One place that the loop reports to. The local record always; trackers as long as they live."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..config.tracking import AlarmsConfig, TrackingConfig
from ..errors import SurefootError, UserError
from ..records import Rollout
from .alarms import AlarmBell
from .api import Alarm, Row, RunInfo, Tracker
from .clock import PhaseClock
from .jsonl import MetricsFile
from .run_folder import RunFolder
from .summary import Status, summarise
from .table import TRACKERS

if TYPE_CHECKING:
    from .console import Console


@runtime_checkable
class _Stoppable(Protocol):
    """A tracker that holds something of the process (the console holds stdout) and must give it back when it fails."""

    def stop(self) -> None: ...


class Trackers:
    """Fans out to `metrics.jsonl`, the alarms and all trackers, in that order.

    A tracker that fails in `start` stops the run. One that fails later is announced once and left out from then on;
    the local record goes on. Making this object imports the trackers' packages and fails when one is missing, so
    make it before the model loads.

    Args:
        tracking: Which trackers.
        alarms: Thresholds.
        folder: The run's folder.
        warn: Where warnings go when there is no console to say them.

    Raises:
        UserError: `tracker-missing-package`.
    """

    def __init__(
        self,
        tracking: TrackingConfig,
        alarms: AlarmsConfig,
        folder: RunFolder,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._trackers: dict[str, Tracker] = {name: TRACKERS[name]() for name in tracking.trackers}
        self._alarms_config, self._folder, self._project = alarms, folder, tracking.project
        self._warn = warn or (lambda text: print(text, file=sys.stderr, flush=True))
        self.clock = PhaseClock()
        self.on_phase: Callable[[str], None] = lambda name: None
        """Called as a phase begins and ends."""
        self._file: MetricsFile | None = None
        self._rows: list[Row] = []
        self._said: list[Alarm] = []
        self._started = time.monotonic()

    def start(
        self,
        name: str,
        steps: int,
        config: Mapping[str, Any],
        facts: Mapping[str, str] | None = None,
        resumed_step: int | None = None,
    ) -> None:
        """Open the local record and all trackers.

        Args:
            name: The run's name.
            steps: How many steps it is to have in all.
            config: The resolved configuration as a plain tree.
            facts: Lines for people: model, data, device.
            resumed_step: Last step of the checkpoint that the run goes on from; the record is cut back to it. None
                starts anew.

        Raises:
            UserError: `tracker-start`, or what the tracker itself raised as one. All trackers are closed again.
        """
        self._folder.rewind(resumed_step)
        self._file = file = MetricsFile(self._folder.metrics, resumed_step)
        self._rows = list(file.history)
        self._said = [Alarm(line["code"], line["step"], line["message"]) for line in self._folder.read_alarms()]
        self._bell = AlarmBell(self._alarms_config, self._rows, [alarm.code for alarm in self._said])
        info = RunInfo(
            name,
            self._project,
            self._folder.path,
            self._folder.run_id(),
            steps,
            config,
            facts or {},
            file.history,
            resumed_step,
        )
        started: dict[str, Tracker] = {}
        # The console last: what the others print at the start stays above it.
        for key in sorted(self._trackers, key=lambda k: k == "console"):
            try:
                self._trackers[key].start(info)
            except Exception as error:
                self._trackers = started
                self.close("failed")
                if isinstance(error, SurefootError):
                    raise
                hint = f"Mend it, or take `{key}` out of tracking.trackers."
                raise UserError(
                    "tracker-start", f"{key} could not start: {error}", key="tracking.trackers", hint=hint
                ) from error
            started[key] = self._trackers[key]
        if file.dropped:
            after = "" if resumed_step is None else f" after step {resumed_step}"
            self.message(f"{file.dropped} recorded steps{after} are dropped: they are made again")
        self._started = time.monotonic()
        self.clock.lap()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step, and show that it runs. `time/NAME` is in `clock.lap()`."""
        self._with_console(lambda console: console.phase(name))
        self.on_phase(name)
        with self.clock.phase(name):
            yield
        self.on_phase(f"after {name}")

    def log(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Record a step, once: evaluation metrics of the same step belong in the same call.

        Returns:
            The alarms that went off for the first time. They are recorded and shown already; `ends_run` says which
            of them the user wants to end the run.

        Raises:
            RunError: `disk-full`: the local record can't be written.
        """
        assert self._file is not None, "start comes first"
        row = {"step": step, **metrics}
        self._file.log(step, row)
        self._rows.append(row)
        return self._tell(step, row)

    def amend(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Add to the row that a run goes on from what it lacks, before any step is logged; see `log`."""
        assert self._file is not None, "start comes first"
        self._rows[-1] = row = self._file.amend(metrics)
        return self._tell(int(row["step"]), row)

    def _tell(self, step: int, row: Row) -> list[Alarm]:
        self._each(lambda tracker: tracker.log(step, row))
        new = self._bell.ring(step, row)
        for alarm in new:
            self.alarm(alarm)
        return new

    def sample(self, step: int, rollout: Rollout) -> None:
        """Show one rollout."""
        self._each(lambda tracker: tracker.sample(step, rollout))

    def alarm(self, alarm: Alarm) -> None:
        """Record and show an alarm that something else than the metrics rang."""
        self._said.append(alarm)
        self._folder.add_alarm(alarm)
        self._each(lambda tracker: tracker.alarm(alarm))
        if "console" not in self._trackers:
            self._warn(f"{alarm.code} at step {alarm.step}: {alarm.message}")

    def ends_run(self, alarm: Alarm) -> bool:
        """Say whether `alarms.stop_on` names this alarm."""
        return self._bell.ends_run(alarm)

    def message(self, text: str) -> None:
        """Tell the user something, without disturbing the display."""
        if not self._with_console(lambda console: console.message(text)):
            self._warn(text)

    @property
    def rows(self) -> list[Row]:
        """All rows so far, those before a resumed step too."""
        return self._rows

    def finish(self, status: Status = "finished", extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write `summary.json` and close everything. `extra` is added to the summary, which is returned."""
        assert self._file is not None, "start comes first"
        summary = summarise(self._rows, status, time.monotonic() - self._started, self._said)
        summary |= {"folder": str(self._folder.path), **(extra or {})}
        try:
            self._folder.write_summary(summary)
        finally:
            self._each(lambda tracker: tracker.finish(summary))
            self._file.close()
            self._trackers = {}
        return summary

    def close(self, status: Status = "failed") -> None:
        """Close everything without a summary. Does nothing before `start` and after `finish`."""
        if self._file is None:
            return
        self._each(lambda tracker: tracker.finish({"status": status, "folder": str(self._folder.path)}))
        self._trackers = {}
        self._file.close()

    def _with_console(self, call: Callable[[Console], None]) -> bool:
        console: Any = self._trackers.get("console")
        if console is None:
            return False
        self._guard("console", lambda: call(console))
        return True

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guard(name, lambda tracker=tracker: call(tracker))

    def _guard(self, name: str, call: Callable[[], None]) -> None:
        """Make a call that must not stop the run."""
        try:
            call()
        except Exception as error:
            tracker = self._trackers.pop(name, None)
            with contextlib.suppress(Exception):
                if isinstance(tracker, _Stoppable):
                    tracker.stop()
            with contextlib.suppress(Exception):
                self.message(
                    f"warning: tracker {name} failed ({type(error).__name__}: {error}) and is left out from here on; "
                    f"{self._folder.metrics} goes on"
                )
