"""A thousand steps: no memory, thread, file handle or temporary file is left behind by a step."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil
import pytest

from surefoot.controller import loop
from surefoot.controller.run import run_training

from .tiny_run import metrics_of, tiny_config


@pytest.mark.slow
def test_a_thousand_steps_leave_nothing_behind(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    process = psutil.Process()
    seen: list[tuple[int, int, int, int]] = []
    inner = loop.step

    async def watched(run, number):
        await inner(run, number)
        if number % 100 == 0:
            temporary = sum(1 for _ in os.scandir(tempfile.gettempdir()))
            seen.append((process.memory_info().rss, process.num_threads(), process.num_fds(), temporary))

    monkeypatch.setattr(loop, "step", watched)
    reward = {"functions": [{"type": "python", "function": f"{tmp_path / 'reward.py'}:digits"}], "workers": 1}
    config = tiny_config(
        tmp_path,
        tiny_folder,
        rewards=reward,
        train={"steps": 1000, "prompts_per_step": 2, "samples_per_prompt": 2},
        rollout={"sampling": {"max_response_length": 4}},
        tracking={"rollouts_every": 0},
        checkpoint={"every": 50, "keep_last": 2},
    )
    run_training(config)
    assert len(metrics_of(config)) == 1000
    folder = tmp_path / "runs" / "tiny"
    assert len(list((folder / "checkpoints").iterdir())) == 2
    assert list((folder / "rollouts").iterdir()) == []
    start, end = seen[1], seen[-1]  # the first hundred steps warm caches up
    assert end[0] < 1.05 * start[0]
    assert end[1:3] == start[1:3]
    assert end[3] <= start[3] + 5  # other programs of the machine use the folder too
    assert not process.children(recursive=True)
