"""Every kind of reward: how it is built, where it runs, whether it reads the row's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..config.rewards import PythonReward, RewardsConfig, RewardSpec
from ..plugins import load_function
from . import code, exact, format, judge, math, reasoning_gym
from .api import RewardFunction, adapt

Place = Literal["inline", "verifier", "worker", "loop", "model"]
"""Where a function runs: `inline` in the controller; `verifier` in a worker process that has locked itself down;
`worker` in a worker process that may do anything; `loop` in the controller's event loop for rewards; `model` in its
thread for reward models."""


@dataclass(frozen=True, slots=True)
class RewardType:
    """A row of the table. `build(spec, timeout_seconds)` is None for reward models, which `model.py` holds."""

    build: Callable[[Any, float], RewardFunction] | None
    place: Place
    needs_answer: bool


def _build_python(spec: PythonReward, timeout_seconds: float) -> RewardFunction:
    return adapt(load_function(spec.function, "rewards.functions"), spec.params, spec.batch)


REWARDS: dict[str, RewardType] = {
    "reasoning_gym": RewardType(reasoning_gym.build, "verifier", needs_answer=False),
    "math": RewardType(math.build, "verifier", needs_answer=True),
    "exact": RewardType(exact.build, "verifier", needs_answer=True),
    "regex": RewardType(format.build_regex, "verifier", needs_answer=False),
    "length": RewardType(format.build_length, "inline", needs_answer=False),
    "code": RewardType(code.build, "worker", needs_answer=True),
    "model": RewardType(None, "model", needs_answer=False),
    "judge": RewardType(judge.build, "loop", needs_answer=False),
    "python": RewardType(_build_python, "worker", needs_answer=False),
}


def build(spec: RewardSpec, timeout_seconds: float) -> RewardFunction:
    """Return a reward's function, ready to call.

    Raises:
        UserError: The user's function cannot be loaded.
    """
    builder = REWARDS[spec.type].build
    assert builder is not None, "reward models are not built here"
    return builder(spec, timeout_seconds)


def needs_answer(spec: RewardSpec) -> bool:
    """Whether the reward reads the row's answer, so that data without one should be refused before a model loads."""
    asks = spec.type == "judge" and "{answer}" in spec.prompt
    return REWARDS[spec.type].needs_answer or asks


def names(specs: list[RewardSpec]) -> list[str]:
    """Return each reward's name in metrics and errors: its own, or its type."""
    return [spec.name or spec.type for spec in specs]


def answers_required(config: RewardsConfig) -> bool:
    """Whether every row must have an answer: a reward reads it and is not restricted to some of the sources."""
    return any(needs_answer(spec) and spec.sources is None for spec in config.functions)
