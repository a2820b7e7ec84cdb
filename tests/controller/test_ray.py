"""Real Ray: what a cluster does not have is refused; and a whole run of FSDP2 ranks and a vLLM engine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from surefoot.config.placement import PlacementConfig, PoolConfig
from surefoot.controller.cluster import connect, reserve
from surefoot.controller.fanout import gather
from surefoot.controller.placement import Plan, Pool
from surefoot.errors import RunError, UserError

from ..tiny import save_tiny
from .tiny_run import metrics_of, tiny_config

PLACEMENT = PlacementConfig(type="ray", pools={"main": PoolConfig(processes_per_node=1)}, reserve_timeout=3)


def pool(name: str, count: int, cpus: float = 0.5) -> Pool:
    return Pool(name, 1, count, False, cpus)


class Worker:
    def fail(self) -> None:
        raise UserError("config-bad-value", "too much", key="train.steps", got=9)

    def break_down(self) -> None:
        raise ZeroDivisionError("by zero")

    def die(self) -> None:
        import os

        os._exit(7)

    def wait(self) -> None:
        time.sleep(60)


@pytest.fixture(scope="module")
def cluster():
    with connect(PLACEMENT):
        yield


def test_what_the_cluster_never_has_is_refused_at_once(cluster):
    started = time.monotonic()
    wanted = Plan({"main": pool("main", 4000, 1.0)}, {"main": ("actor",)}, "main", 1)
    with pytest.raises(UserError, match=r"4000 CPU") as caught, reserve(wanted, PLACEMENT):
        pass
    assert caught.value.code == "cluster-too-small"
    assert time.monotonic() - started < 5


def test_what_others_hold_is_refused_after_the_deadline_naming_them(cluster):
    import ray

    cores = int(ray.cluster_resources()["CPU"])
    everything = Plan({"big": pool("big", cores, 1.0)}, {"big": ("actor",)}, "big", 1)
    with (
        reserve(everything, PLACEMENT),
        pytest.raises(UserError, match=r"held by: surefoot-\d+-big-0") as caught,
        reserve(Plan({"more": pool("more", 1, 1.0)}, {"more": ("actor",)}, "more", 1), PLACEMENT),
    ):
        pass
    assert "0 CPU free" in str(caught.value) or "nothing free" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "kind", "says"),
    [
        ("fail", UserError, "too much (in second)"),
        ("break_down", RunError, "second failed: ZeroDivisionError: by zero"),
        ("die", RunError, "second is gone"),
    ],
)
def test_the_first_failure_ends_the_wait_and_names_its_process(cluster, method: str, kind: type, says: str):
    with reserve(Plan({"main": pool("main", 2)}, {"main": ("actor",)}, "main", 1), PLACEMENT) as slots:
        first, second = (slot.start(name, Worker) for slot, name in zip(slots["main"], "ab", strict=True))
        started = time.monotonic()
        with pytest.raises(kind) as caught:
            gather({"first": first.wait.remote(), "second": getattr(second, method).remote()})
    assert says in str(caught.value)
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_the_tiny_model_learns_on_two_ranks_and_a_vllm_engine(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    two = {"processes_per_node": 2, "cpus_per_process": 0.5}
    config = tiny_config(
        tmp_path,
        save_tiny(tmp_path / "model", hidden=128),  # vLLM's CPU attention wants heads of at least 32
        placement={
            "type": "ray",
            "pools": {"train": two, "rollout": {"processes_per_node": 1, "cpus_per_process": 0.5}},
            "roles": {"rollout": "rollout"},
        },
        train={"steps": 30},
    )
    from surefoot.controller.run import run_training

    run_training(config)
    rows = metrics_of(config)
    assert len(rows) == 30
    assert np.mean([row["reward/mean"] for row in rows[-3:]]) > rows[0]["reward/mean"] + 0.3
    # A step whose rewards are all equal trains nothing and has no gap.
    gaps = [row["actor/engine_gap"] for row in rows if "actor/engine_gap" in row]
    assert len(gaps) > 10
    assert max(gaps) < 1e-4
    probed = {row["step"]: row["sync/probe_gap"] for row in rows if "sync/probe_gap" in row}
    assert set(probed) == {20}  # the first probe is before the first step
    assert max(probed.values()) < 1e-4


@pytest.mark.slow
def test_the_nodes_of_a_running_cluster_are_shown_and_none_is_said_to_be_none(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    port = f"--port={address.split(':')[1]}"
    show = [sys.executable, "-m", "surefoot.cli", "cluster", address]
    gone = subprocess.run(show, capture_output=True, text=True, timeout=120, check=False)
    assert gone.returncode == 2
    assert f"got: {address}" in gone.stderr
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", port, "--num-cpus=3", "--block"]
    head = subprocess.Popen(
        [*ray, "--include-dashboard=false", "--object-store-memory=100000000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while (shown := subprocess.run(show, capture_output=True, text=True, timeout=120, check=False)).returncode:
            assert time.monotonic() < deadline, shown.stderr
        assert "3 of 3 free" in shown.stdout
        assert "nothing is reserved" in shown.stdout
    finally:
        head.terminate()
        head.wait(30)
