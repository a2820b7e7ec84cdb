"""The real trackers, one contract: they record what is logged, go on after a resume, and offline dial nobody."""

from __future__ import annotations

import importlib.util
import math
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from surefoot.records import Reward
from surefoot.tracking.api import Alarm, RunInfo
from surefoot.tracking.table import TRACKERS
from surefoot.tracking.tensorboard import TensorboardTracker
from tests.tracking.helpers import make_rollout


def info(folder: Path, **options) -> RunInfo:
    values = {
        "name": "a",
        "project": "sums",
        "folder": folder,
        "run_id": "abc123def456",
        "steps": 5,
        "config": {"train": {"steps": 5}},
    }
    return RunInfo(**(values | options))


def drive(name: str, folder: Path) -> None:
    """A run of two steps, then one that goes on after step 1."""
    for first, last, resumed in ((0, 2, None), (2, 3, 1)):
        tracker = TRACKERS[name]()
        tracker.start(info(folder, resumed_step=resumed))
        for step in range(first, last + 1):
            tracker.log(step, {"step": step, "reward/mean": step / 10, "actor/loss": math.nan if step == 1 else 0.1})
            tracker.sample(step, make_rollout(response="12 \x1b ä", reward=Reward(1.0)))
        tracker.alarm(Alarm("alarm-kl", 2, "far"))
        tracker.finish({"status": "finished"})


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    drive("tensorboard", tmp_path)
    record = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, round(event.value, 3)) for event in record.Scalars("reward/mean")] == [
        (0, 0),
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
    ]
    assert "step" not in record.Tags()["scalars"]
    (text, *_) = record.Tensors("sample")[-1].tensor_proto.string_val
    assert "    7 + 5 =" in text.decode()


def test_tensorboard_is_written_without_torch(tmp_path: Path):
    script = f"""
import sys
from pathlib import Path
from tests.tracking.test_trackers import drive
heavy = {{"torch", "tensorflow"}} & set(sys.modules)
drive("tensorboard", Path({str(tmp_path)!r}))
print(heavy | ({{"torch", "tensorflow"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "set()\n", done.stderr


def test_tracking_loads_without_torch_and_without_any_tracker():
    script = """
import sys
import surefoot.tracking.hub, surefoot.tracking.console, surefoot.tracking.run_folder
print({"torch", "transformers", "wandb", "mlflow", "tensorboard", "pyarrow", "pandas"} & set(sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"


def test_the_tensorboard_tracker_closes_its_file(tmp_path: Path):
    tracker = TensorboardTracker()
    tracker.start(info(tmp_path))
    tracker.log(1, {"a": 1.0})
    tracker.finish({})
    with pytest.raises(Exception, match=r".+"):
        tracker.log(2, {"a": 1.0})


# How each tracker is told to stay on this machine, in its users' own words.
OFFLINE = {
    "wandb": {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    "mlflow": {"MLFLOW_TRACKING_URI": "file:{folder}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
    "swanlab": {"SWANLAB_MODE": "offline"},
    "trackio": {"TRACKIO_DIR": "{folder}/trackio"},
}
needs = [
    pytest.param(n, marks=pytest.mark.skipif(not importlib.util.find_spec(n), reason=f"{n} is not installed"))
    for n in OFFLINE
]


@pytest.mark.parametrize("name", needs)
def test_offline_the_run_is_recorded_and_nobody_is_dialled(name: str, tmp_path: Path):
    """All ways out lead to a listener here: a proxy for most, a server's address for those that take one."""
    calls: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                calls.append(connection.recv(200))
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        environ = os.environ | {
            "HTTP_PROXY": address,
            "HTTPS_PROXY": address,
            "http_proxy": address,
            "https_proxy": address,
        }
        environ |= {"WANDB_BASE_URL": address, "HOME": str(tmp_path), "NO_PROXY": "", "no_proxy": ""}
        environ |= {key: value.format(folder=tmp_path) for key, value in OFFLINE[name].items()}
        script = "from pathlib import Path\nfrom tests.tracking.test_trackers import drive\n"
        script += f"drive({name!r}, Path({str(tmp_path)!r}))"
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environ,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
        )
        server.close()
    assert done.returncode == 0, done.stderr
    assert calls == []
    assert any(path.is_file() and path.stat().st_size > 0 for path in tmp_path.rglob("*"))
