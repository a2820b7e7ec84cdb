"""Whole runs of the tiny model: real tokenizer, real sampler, real trainer, real files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from surefoot.config import RunConfig
from surefoot.config.load import build_config

REWARD = '''
def digits(item):
    """Share of digits in the response."""
    text = item.response
    return sum(c.isdigit() for c in text) / max(1, len(text))
'''


def write_rows(folder: Path, count: int = 32, name: str = "rows.jsonl") -> Path:
    """Prompts `say N`, with an answer."""
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(count)))
    return path


def tiny_config(folder: Path, weights: Path, /, **sections: Any) -> RunConfig:
    """A run of 4 steps, 4 x 4 rollouts of 8 tokens, in float32. Sections given are merged into it."""
    (folder / "reward.py").write_text(REWARD)
    values: dict[str, Any] = {
        "name": "tiny",
        "output_dir": str(folder / "runs"),
        "device": "cpu",
        "threads": 1,
        "model": {"path": str(weights), "dtype": "float32"},
        "data": {"sources": [{"type": "file", "path": str(write_rows(folder))}], "max_prompt_length": 64},
        "rollout": {"sampling": {"max_response_length": 8}},
        "rewards": {"functions": [{"type": "python", "function": f"{folder / 'reward.py'}:digits"}], "workers": 0},
        "train": {"steps": 4, "prompts_per_step": 4, "samples_per_prompt": 4, "optimizer": {"learning_rate": 3e-3}},
        "tracking": {"trackers": []},
    }
    return build_config(merge(values, sections))


def merge(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Deep merge; lists are replaced."""
    out = dict(base)
    for key, value in more.items():
        out[key] = merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def write_config(folder: Path, config: RunConfig) -> Path:
    """Write a configuration for the command line."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def metrics_of(config: RunConfig) -> list[dict[str, Any]]:
    """All lines of the run's metrics file."""
    path = Path(config.output_dir) / config.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_clocks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics that must repeat: all but seconds and what is made of them."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/", "seconds/", "reward/seconds"))}
        for row in rows
    ]


def start_run(config_path: Path) -> subprocess.Popen[str]:
    """Train by the command line, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "surefoot.cli", "train", str(config_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_rows(process: subprocess.Popen[str], config: RunConfig, rows: int, seconds: float) -> None:
    """Wait until a started run has recorded so many rows."""
    metrics = Path(config.output_dir) / config.name / "metrics.jsonl"
    deadline = time.monotonic() + seconds
    while not (metrics.exists() and metrics.read_text().count("\n") >= rows):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
