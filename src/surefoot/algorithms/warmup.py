"""When the actor starts to learn beside a new critic: a pure state machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config.algorithm import AlgorithmConfig
from ..errors import RunError


@dataclass(frozen=True, slots=True)
class WarmupState:
    """Where the warm-up stands. Plain numbers: `dataclasses.asdict` goes into a checkpoint, `WarmupState(**d)` back.

    `steps` counts the steps in which only the critic learnt, `streak` the steps in a row whose explained variance
    reached the bound.
    """

    steps: int = 0
    streak: int = 0
    done: bool = False


def advance(
    state: WarmupState, config: AlgorithmConfig, explained_variance: float | None, step: int
) -> tuple[WarmupState, bool, str | None]:
    """Decide, once a step and before any update, whether the actor learns in this step.

    Args:
        state: The state after the step before; `WarmupState()` at the start.
        config: `critic_warmup`: so many steps without the actor, or `auto` by `auto_warmup`.
        explained_variance: Of this step's rollouts, which the critic has not trained on; None when it is undefined
            (equal returns), which neither adds to the streak nor ends it.
        step: Number of the step, for the messages.

    Returns:
        The new state; whether the actor trains in this step; a line to tell the user when it starts.

    Raises:
        RunError: The critic is not ready after `auto_warmup.max_steps` steps (`critic-not-ready`).
    """
    if state.done:
        return state, True, None
    if config.critic_warmup != "auto":
        if state.steps < config.critic_warmup:
            return replace(state, steps=state.steps + 1), False, None
        message = f"step {step}: critic warm-up is over, the actor trains from here on" if state.steps else None
        return replace(state, done=True), True, message
    bounds = config.auto_warmup
    streak = state.streak
    if explained_variance is not None:
        streak = streak + 1 if explained_variance >= bounds.explained_variance else 0
    if streak >= bounds.patience:
        message = (
            f"step {step}: the critic explains at least {bounds.explained_variance:.0%} of the returns' variance "
            f"for {bounds.patience} steps in a row, the actor trains from here on"
        )
        return replace(state, streak=streak, done=True), True, message
    if bounds.max_steps is not None and state.steps >= bounds.max_steps:
        raise RunError(
            "critic-not-ready",
            f"the critic is not ready after {state.steps} steps of warm-up",
            key="algorithm.auto_warmup.max_steps",
            got="no explained variance (equal returns)" if explained_variance is None else f"{explained_variance:.3f}",
            want=f"explained variance of {bounds.explained_variance} for {bounds.patience} steps in a row",
            hint="Raise critic.learning_rate or critic.passes_per_step, or lower auto_warmup.explained_variance.",
        )
    return replace(state, steps=state.steps + 1, streak=streak), False, None
