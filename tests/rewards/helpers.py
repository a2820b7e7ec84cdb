"""Rollouts and configurations for the tests of rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.config.rewards import RewardsConfig
from surefoot.records import FinishReason, Prompt, Reward, Rollout
from surefoot.rewards.api import RewardItem
from surefoot.rewards.runner import RewardRunner

FUNCTIONS = Path(__file__).parent / "user_functions.py"


def rollout(
    response: str = "",
    answer: Any = None,
    *,
    prompt: str = "question",
    source: str = "data",
    extra: dict[str, Any] | None = None,
    index: int = 0,
    length: int = 4,
    finish_reason: FinishReason = "stop",
    messages: tuple[dict[str, Any], ...] | None = None,
) -> Rollout:
    """A rollout of a 3-token prompt and a response of `length` tokens."""
    if messages is None:
        messages = ({"role": "user", "content": prompt},)
    total = 3 + length
    return Rollout(
        prompt=Prompt("data/0", np.arange(3, dtype=np.int32), prompt, messages, answer, source, extra or {}),
        sample_index=index,
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=np.array([False] * 3 + [True] * length),
        logprobs=np.zeros(total, np.float32),
        policy_version=np.zeros(total, np.int32),
        finish_reason=finish_reason,
        response=response,
    )


def item(response: str = "", answer: Any = None, **options: Any) -> RewardItem:
    """The view of such a rollout."""
    return RewardItem.of(rollout(response, answer, **options))


def config(*functions: dict[str, Any], workers: int = 0, timeout_seconds: float = 10.0) -> RewardsConfig:
    """A rewards section."""
    values = {"functions": list(functions), "workers": workers, "timeout_seconds": timeout_seconds}
    return RewardsConfig.model_validate(values)


def python(function: str, /, **keys: Any) -> dict[str, Any]:
    """A reward of type `python` from `user_functions.py`."""
    return {"type": "python", "function": f"{FUNCTIONS}:{function}", **keys}


def score(rewards: RewardsConfig, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Score with a runner made for this one call."""
    with RewardRunner(rewards) as runner:
        return asyncio.run(runner.score(rollouts))


def rewards_of(rollouts: Sequence[Rollout]) -> list[Reward]:
    """The rewards, which must all be there."""
    assert all(r.reward is not None for r in rollouts)
    return [r.reward for r in rollouts if r.reward is not None]


def scores(rollouts: Sequence[Rollout]) -> list[float | None]:
    """The scores."""
    return [reward.score for reward in rewards_of(rollouts)]
