"""Running ahead: the bound holds for every token, slow prompts keep their share, nothing is lost or asked twice."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from surefoot.controller import parts, run
from surefoot.controller.preflight import preflight
from surefoot.controller.run import train_ready
from surefoot.controller.signals import Interrupted, StopSignal
from surefoot.errors import RunError
from surefoot.records import Metric
from surefoot.rollout.embedded import EmbeddedEngine

from .tiny_run import metrics_of, tiny_config

SLOW = 5  # times as long
SOURCES = [("quick.jsonl", 27), ("slow.jsonl", 3)]  # a tenth is slow


class UnevenEngine(EmbeddedEngine):
    """The real engine on weights of its own, where prompts of one source take several times as long."""

    async def generate(self, request):
        completion = await super().generate(request)
        await asyncio.sleep(0.02 * (SLOW if request.id.startswith("slow") else 1))
        return completion


@dataclass
class CopyLink:
    """Brings the actor's weights to the sampler's copy."""

    actor: torch.nn.Module
    copied: torch.nn.Module
    sampler: EmbeddedEngine

    async def begin_training(self) -> None:
        pass

    async def begin_sampling(self, version: int | None) -> dict[str, Metric]:
        if version is not None:
            self.copied.load_state_dict(self.actor.state_dict())
            await self.sampler.update_weights(None, version)
        return {}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler beside the trainer, as on GPUs of its own."""

    @contextlib.contextmanager
    def bring_up(ready, folder, watchdog):
        engines = parts.load_engines(ready)
        copied = copy.deepcopy(engines.actor.model)
        sampler = UnevenEngine(copied, ready.tokenizer, ready.stop_ids, 64, torch.device("cpu"))
        link = CopyLink(engines.actor.model, copied, sampler)
        yield replace(engines, sampler=sampler, link=link)

    monkeypatch.setattr(run, "bring_up", bring_up)


def config_of(tmp_path: Path, weights: Path, **train):
    sources = []
    for name, count in SOURCES:
        rows = [{"id": f"{name[:5]}-{i}", "prompt": f"say {i}"} for i in range(count)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append({"type": "file", "path": str(tmp_path / name), "weight": float(count)})
    return tiny_config(
        tmp_path, weights, data={"sources": sources}, train={"prompts_per_step": 5, "samples_per_prompt": 2} | train
    )


def go(config, staleness: int) -> dict:
    """Train ahead; the check that refuses it in one process is passed by."""
    ready = preflight(config)
    rollout = config.rollout.model_copy(update={"max_staleness": staleness})
    ready = replace(ready, config=ready.config.model_copy(update={"rollout": rollout}))
    with StopSignal() as stop:
        return train_ready(ready, stop)


def trained(config) -> list[dict]:
    folder = Path(config.output_dir) / config.name / "rollouts"
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("staleness", [1, 3])
def test_slow_prompts_keep_their_share_and_the_bound_holds_through_kill_and_resume(tmp_path, tiny_folder, staleness):
    config = config_of(tmp_path, tiny_folder, steps=18)
    inner = run.loop_async.step

    async def interrupted(one, ahead, number):
        await inner(one, ahead, number)
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.loop_async, "step", interrupted)
        with pytest.raises(Interrupted):
            go(config, staleness)
    assert metrics_of(config)[-1]["step"] == 7
    go(config, staleness)
    rows = metrics_of(config)
    assert [row["step"] for row in rows] == list(range(1, 19))
    assert max(row["rollout/staleness_max"] for row in rows) == staleness
    assert all(row["rollout/count"] == 10 for row in rows)
    # Every prompt of the first three epochs was trained on in each: none was lost, none came twice.
    counts = Counter(row["prompt_id"] for row in trained(config))
    assert set(counts.values()) == {2 * 18 * 5 // 30}
    slow = sum(count for name, count in counts.items() if name.startswith("slow"))
    assert slow / counts.total() == pytest.approx(0.1, abs=0.02)
    # Each token carries the version that sampled it, never more than the bound behind what it trained.
    for row in trained(config):
        versions = np.array(row["policy_version"])[np.array(row["loss_mask"])]
        assert (row["step"] - 1 - versions <= staleness).all()
        assert (versions <= row["step"] - 1).all()


@pytest.mark.usefixtures("apart")
def test_it_learns_and_sampling_overlaps_with_training(tmp_path, tiny_folder):
    config = config_of(tmp_path, tiny_folder, steps=20, samples_per_prompt=4)
    go(config, 2)
    rows = metrics_of(config)
    assert np.mean([r["reward/mean"] for r in rows[-4:]]) > rows[0]["reward/mean"] + 0.1
    assert "actor/engine_gap" not in rows[-1]  # the alarm's; the distance to an older policy is no fault
    assert rows[-1]["actor/policy_gap"] > 0
    assert {"rollout/staleness_mean", "rollout/staleness_max", "time/wait"} <= rows[-1].keys()
    # What a step waits for its rollouts is less than the slowest takes: it was under way before.
    assert np.median([row["time/wait"] for row in rows[3:]]) < 0.02 * SLOW


@pytest.mark.usefixtures("apart")
def test_staleness_one_trains_the_same_prompts_in_the_same_steps_as_taking_turns(tmp_path, tiny_folder):
    ahead = config_of(tmp_path, tiny_folder, steps=6)
    turns = ahead.model_copy(update={"name": "turns"})
    go(ahead, 1)
    run.run_training(turns)
    assert [(r["step"], r["prompt_id"]) for r in trained(ahead)] == [
        (r["step"], r["prompt_id"]) for r in trained(turns)
    ]


@pytest.mark.usefixtures("apart")
def test_a_failure_while_running_ahead_saves_the_last_step_and_leaves_no_request(tmp_path, tiny_folder, monkeypatch):
    config = config_of(tmp_path, tiny_folder, steps=10)
    inner, calls = UnevenEngine.generate, []
    open_rows: set[str] = set()

    async def failing(self, request):
        calls.append(request.id)
        if len(calls) == 55:
            raise RunError("engine-died", "the engine is gone")
        open_rows.add(request.id)
        try:
            return await inner(self, request)
        finally:
            open_rows.discard(request.id)

    monkeypatch.setattr(UnevenEngine, "generate", failing)
    with pytest.raises(RunError, match="the engine is gone"):
        go(config, 1)
    assert not open_rows
    last = metrics_of(config)[-1]["step"]
    folder = tmp_path / "runs" / "tiny" / "checkpoints" / f"step_{last:06d}"
    assert last >= 3
    assert (folder / "manifest.json").is_file()
