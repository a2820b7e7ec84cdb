"""The folder of a run: what is in it, and who may write there.

runs/NAME/config.yaml  metrics.jsonl  alarms.jsonl  summary.json  rollouts/step_000012.parquet  checkpoints/step_000012/
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ..errors import RunError, UserError
from ..records import Rollout
from .api import Alarm
from .environment import git_state, versions
from .files import free_bytes, human_bytes, is_disk_full, naming_full_disk, write_atomic
from .lock import FolderLock
from .rollout_file import PerToken, write_rollout_file


class RunFolder:
    """Creates `output_dir/name`, locks it, and writes the run's files.

    Raises:
        UserError: `run-folder-locked` or `run-folder-unwritable`.
    """

    def __init__(self, output_dir: str | Path, name: str) -> None:
        self.path = Path(output_dir) / name
        try:
            for folder in (self.path, self.rollouts, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path)
        except OSError as error:
            raise UserError(
                "run-folder-unwritable", f"can't be used as run folder: {error.strerror}", key=str(self.path)
            ) from None
        self._rollouts_failed = False

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def alarms(self) -> Path:
        """One JSON object an alarm."""
        return self.path / "alarms.jsonl"

    @property
    def summary(self) -> Path:
        """What came out."""
        return self.path / "summary.json"

    @property
    def rollouts(self) -> Path:
        """Folder of the parquet files."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def used(self) -> bool:
        """Whether a run has left steps or checkpoints here."""
        has_steps = self.metrics.exists() and self.metrics.stat().st_size > 0
        return has_steps or any(self.checkpoints.iterdir())

    def run_id(self) -> str:
        """Return a word that stays the same when the run is resumed: trackers know the run by it."""
        file = self.path / ".run_id"
        if not file.exists():
            write_atomic(file, uuid.uuid4().hex[:12])
        return file.read_text().strip()

    def write_config(self, config_yaml: str) -> list[str]:
        """Write `config.yaml` with what the run is made with as comments above.

        Returns:
            How it differs from the file of the run that is resumed: lines `key: old -> new`; empty in a new run.
        """
        before = yaml.safe_load(self.config.read_text("utf-8")) if self.config.exists() else None
        lines = [f"# {name} {version}" for name, version in versions().items()]
        lines.append(f"# git {git_state(Path.cwd()) or 'no repository'}")
        write_atomic(self.config, "\n".join(lines) + "\n" + config_yaml)
        return config_changes(before, yaml.safe_load(config_yaml)) if before is not None else []

    def rewind(self, step: int | None) -> None:
        """Drop rollout files and alarms of steps after `step` (None: of all), which are about to be made again."""
        for file in self.rollouts.glob("step_*.parquet"):
            number = file.stem.removeprefix("step_")
            if number.isdigit() and (step is None or int(number) > step):
                file.unlink()
        if self.alarms.exists():
            kept = [line for line in self.read_alarms() if step is not None and line["step"] <= step]
            write_atomic(self.alarms, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))

    def write_rollouts(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        advantages: PerToken | None = None,
        trainer_logprobs: PerToken | None = None,
    ) -> Alarm | None:
        """Write a step's rollouts, as `write_rollout_file` says. A full disk costs this file, not the run.

        Returns:
            An alarm at the first time that the disk is full, None otherwise.
        """
        path = self.rollouts / f"step_{step:06d}.parquet"
        try:
            write_rollout_file(path, step, rollouts, advantages, trainer_logprobs)
        except OSError as error:
            if not is_disk_full(error):
                raise
            if self._rollouts_failed:
                return None
            self._rollouts_failed = True
            message = (
                f"no room to write {path} ({human_bytes(free_bytes(path))} free): training goes on without rollout "
                "files where they don't fit. Free some space, or set tracking.rollouts_every=0; metrics and "
                "checkpoints stop the run when they don't fit."
            )
            return Alarm("alarm-disk-full", step, message)
        return None

    def add_alarm(self, alarm: Alarm) -> None:
        """Append an alarm to `alarms.jsonl`. Raises RunError `disk-full`, but not for the alarm that says so."""
        try:
            with naming_full_disk(self.alarms), self.alarms.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(alarm), ensure_ascii=False) + "\n")
        except RunError:
            if alarm.code != "alarm-disk-full":
                raise

    def read_alarms(self) -> list[dict[str, Any]]:
        """Return the alarms so far, each with `code`, `step` and `message`."""
        if not self.alarms.exists():
            return []
        lines: list[dict[str, Any]] = []
        for line in self.alarms.read_text("utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # cut short by a crash
        return lines

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`. Raises RunError `disk-full`."""
        write_atomic(self.summary, json.dumps(summary, indent=2, ensure_ascii=False, default=str) + "\n")

    def close(self) -> None:
        """Let other runs use the folder."""
        self._lock.release()


def config_changes(before: Any, after: Any, key: str = "") -> list[str]:
    """Return the differences of two plain trees as lines `key: old -> new`, in the order of `after`."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = [*after, *(name for name in before if name not in after)]
        return [
            line for n in names for line in config_changes(before.get(n), after.get(n), f"{key}.{n}" if key else str(n))
        ]
    return [] if before == after else [f"{key}: {before!r} -> {after!r}"]
