from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from surefoot.config.tracking import AlarmsConfig, TrackingConfig
from surefoot.errors import RunError, UserError
from surefoot.tracking import table
from surefoot.tracking.api import Alarm, Row, RunInfo
from surefoot.tracking.hub import Trackers
from surefoot.tracking.jsonl import read_metrics
from surefoot.tracking.run_folder import RunFolder
from tests.tracking.helpers import make_rollout


class Recorder:
    """A tracker that keeps what it is told, and raises in the methods that it is told to."""

    def __init__(self, raises: frozenset[str] = frozenset()) -> None:
        self.raises, self.calls = raises, []

    def _take(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name in self.raises:
            raise ConnectionError("server is away")

    def start(self, info: RunInfo) -> None:
        self._take("start", info)

    def log(self, step: int, metrics: Row) -> None:
        self._take("log", step, dict(metrics))

    def sample(self, step: int, rollout: object) -> None:
        self._take("sample", step, rollout)

    def alarm(self, alarm: Alarm) -> None:
        self._take("alarm", alarm)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._take("finish", dict(summary))

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Recorders in place of two trackers; the test sets `raises`."""
    recorders = {"wandb": Recorder(), "mlflow": Recorder()}
    for name, recorder in recorders.items():
        monkeypatch.setitem(table.TRACKERS, name, lambda recorder=recorder: recorder)
    return recorders


def open_hub(tmp_path: Path, warnings: list[str], names: list[str], **options) -> Trackers:
    folder = RunFolder(tmp_path, "a")
    return Trackers(TrackingConfig(trackers=names), AlarmsConfig(**options), folder, warn=warnings.append)


ALL_METHODS = frozenset({"log", "sample", "alarm", "finish"})


@pytest.mark.parametrize("broken", [ALL_METHODS, frozenset({"log"}), frozenset({"finish"})])
def test_a_tracker_that_fails_on_every_call_costs_one_warning_and_nothing_else(
    tmp_path: Path, made: dict[str, Recorder], broken: frozenset[str]
):
    warnings: list[str] = []
    made["wandb"].raises = broken
    hub = open_hub(tmp_path, warnings, ["wandb", "mlflow"])
    hub.start("a", 5, {})
    for step in range(1, 6):
        with hub.phase("generate"):
            pass
        hub.log(step, {"reward/mean": step / 5, "actor/kl_ref": 50.0})
        hub.sample(step, make_rollout())
    summary = hub.finish()
    assert len([w for w in warnings if "wandb" in w]) == 1
    assert "server is away" in warnings[0] + warnings[-1]
    assert [row["step"] for row in read_metrics(tmp_path / "a" / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert summary["status"] == "finished"
    assert made["mlflow"].names.count("log") == 5
    assert made["mlflow"].names[-1] == "finish"
    if "log" in broken:
        assert made["wandb"].names == ["start", "log"]


def test_a_tracker_that_fails_at_the_start_stops_the_run_by_name_and_closes_the_others(tmp_path: Path, made):
    made["mlflow"].raises = frozenset({"start"})
    hub = open_hub(tmp_path, [], ["wandb", "mlflow"])
    with pytest.raises(UserError, match="mlflow could not start: server is away") as caught:
        hub.start("a", 5, {})
    assert caught.value.code == "tracker-start"
    assert made["wandb"].names == ["start", "finish"]


def test_a_missing_package_is_known_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "swanlab", None)
    with pytest.raises(UserError, match=r"pip install 'surefoot\[swanlab\]'") as caught:
        open_hub(tmp_path, [], ["swanlab"])
    assert caught.value.code == "tracker-missing-package"


def test_every_tracker_of_the_configuration_has_a_row():
    from typing import get_args

    from surefoot.config.tracking import TrackerName

    assert list(table.TRACKERS) == list(get_args(TrackerName))


def test_alarms_are_recorded_shown_and_sent_once(tmp_path: Path, made: dict[str, Recorder]):
    warnings: list[str] = []
    hub = open_hub(tmp_path, warnings, ["wandb"], window=2, stop_on=["alarm-kl"])
    hub.start("a", 9, {})
    new = [hub.log(step, {"actor/kl_ref": 50.0}) for step in (1, 2, 3)]
    assert [[alarm.code for alarm in alarms] for alarms in new] == [[], ["alarm-kl"], []]
    assert hub.ends_run(new[1][0])
    (line,) = [json.loads(line) for line in (tmp_path / "a" / "alarms.jsonl").read_text().splitlines()]
    assert (line["code"], line["step"]) == ("alarm-kl", 2)
    assert [warning[:8] for warning in warnings] == ["alarm-kl"]
    assert made["wandb"].names.count("alarm") == 1
    assert hub.finish("stopped")["alarms"] == ["alarm-kl"]


def test_a_resumed_run_continues_record_alarms_and_identity(tmp_path: Path, made: dict[str, Recorder]):
    hub = open_hub(tmp_path, [], ["wandb"], window=2)
    hub.start("a", 9, {})
    for step in range(5):
        hub.log(step, {"actor/kl_ref": 50.0})
    hub._folder.close()  # killed after step 4, with a checkpoint of step 3
    hub = open_hub(tmp_path, warnings := [], ["wandb"], window=2)
    hub.start("a", 9, {}, resumed_step=3)
    assert warnings == ["1 recorded steps after step 3 are dropped: they are made again"]
    assert [hub.log(step, {"actor/kl_ref": 50.0}) for step in (4, 5)] == [[], []]
    first, second = (info for name, info, *_ in made["wandb"].calls if name == "start")
    assert first.run_id == second.run_id
    assert (first.resumed_step, second.resumed_step) == (None, 3)
    assert [row["step"] for row in second.history] == [0, 1, 2, 3]
    assert [row["step"] for row in hub.rows] == [0, 1, 2, 3, 4, 5]


def test_a_run_that_starts_anew_in_a_used_folder_forgets_the_old_alarms(tmp_path: Path, made: dict[str, Recorder]):
    for _ in range(2):
        hub = open_hub(tmp_path, [], [], window=1)
        hub.start("a", 9, {})
        assert [alarm.code for alarm in hub.log(1, {"actor/loss": math.nan})] == ["alarm-nan"]
        hub.finish()
        hub._folder.close()


def test_the_summary_compares_first_with_last_and_base_with_trained(tmp_path: Path):
    hub = open_hub(tmp_path, [], [])
    hub.start("a", 20, {})
    hub.log(0, {"eval/score": 0.25})
    for step in range(1, 21):
        hub.log(step, {"reward/mean": step / 20} | ({"eval/score": 0.61} if step == 20 else {}))
    summary = hub.finish(extra={"tokens": 7})
    assert summary["span"] == 2
    assert summary["compared"]["reward/mean"] == {"first": pytest.approx(0.075), "last": pytest.approx(0.975)}
    assert summary["held_out"] == {"eval/score": {"trained": 0.61, "trained_step": 20, "base": 0.25}}
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert (summary["steps"], summary["tokens"]) == (20, 7)


def test_a_full_disk_for_metrics_ends_the_run(tmp_path: Path):
    hub = open_hub(tmp_path, [], [])
    hub.start("a", 5, {})
    hub._file._file.close()
    hub._file._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(RunError) as caught:
        hub.log(1, {"reward/mean": 1.0})
    assert caught.value.code == "disk-full"


def test_closing_before_the_start_after_the_end_or_twice_does_no_harm(tmp_path: Path, made: dict[str, Recorder]):
    hub = open_hub(tmp_path, [], ["wandb"])
    hub.close()
    hub.start("a", 5, {})
    hub.finish()
    hub.close()
    hub.close()
    assert made["wandb"].names == ["start", "finish"]
