"""The critic's warm-up, step by step."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from surefoot.algorithms.warmup import WarmupState, advance
from surefoot.config.algorithm import AlgorithmConfig
from surefoot.errors import RunError


def walk(config: AlgorithmConfig, variances: list[float | None], state: WarmupState | None = None) -> list[bool]:
    """Whether the actor trains, step by step. The state goes through JSON between steps, as in a resumed run."""
    state = state or WarmupState()
    trains: list[bool] = []
    for step, variance in enumerate(variances, start=1):
        state, actor_trains, message = advance(state, config, variance, step)
        state = WarmupState(**json.loads(json.dumps(asdict(state))))
        trains.append(actor_trains)
        assert (message is not None) == (actor_trains and len(trains) > 1 and not trains[-2])
        assert message is None or f"step {step}" in message
    return trains


def auto(**bounds: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"name": "ppo", "critic_warmup": "auto", "auto_warmup": bounds})


def test_a_fixed_warm_up_lasts_exactly_so_many_steps() -> None:
    assert walk(AlgorithmConfig(critic_warmup=2), [0.9] * 4) == [False, False, True, True]


def test_no_warm_up_is_no_step_and_no_message() -> None:
    assert walk(AlgorithmConfig(critic_warmup=0), [None, -5.0]) == [True, True]


def test_auto_waits_for_a_streak() -> None:
    config = auto(explained_variance=0.5, patience=2)
    # 0.6 alone is not enough, 0.4 breaks the streak; after the start bad values don't matter.
    assert walk(config, [0.1, 0.6, 0.4, 0.5, 0.7, -3.0]) == [False, False, False, False, True, True]


def test_auto_neither_counts_nor_forgets_where_the_variance_is_undefined() -> None:
    config = auto(explained_variance=0.5, patience=2)
    assert walk(config, [0.6, None, 0.6]) == [False, False, True]


def test_auto_gives_up_after_its_longest_wait() -> None:
    config = auto(explained_variance=0.5, patience=1, max_steps=3)
    # Ready on the rollouts that follow the third critic-only step: in time.
    assert walk(config, [0.1, 0.1, 0.1, 0.5]) == [False, False, False, True]
    state = WarmupState(steps=3)
    with pytest.raises(RunError, match="not ready after 3 steps") as caught:
        advance(state, config, 0.1, 4)
    assert caught.value.code == "critic-not-ready"
    with pytest.raises(RunError, match="equal returns"):
        advance(state, config, None, 4)
