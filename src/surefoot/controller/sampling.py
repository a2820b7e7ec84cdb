"""Prompts -> scored rollouts: programs run side by side, and rewards start while other rows still generate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..config.rollout import SamplingConfig
from ..data.template import Template
from ..errors import RunError, SurefootError
from ..records import Prompt, Rollout
from ..rewards.runner import RewardRunner
from ..rollout.api import InferenceEngine, ProgramContext, RolloutProgram
from ..seeds import derive_seed


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The scored rollouts of one batch, prompt after prompt, sample after sample.

    `failures` tells, for each prompt whose program raised, what it raised; such a prompt has no rollouts.
    """

    rollouts: list[Rollout]
    failures: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class RolloutCollector:
    """What does not change from batch to batch."""

    engine: InferenceEngine
    program: RolloutProgram
    template: Template
    rewards: RewardRunner
    beat: Callable[[], None] = lambda: None  # called when a prompt is done

    async def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_samples: int,
        seed: Callable[[str, int, int], int],
        generated: Callable[[], None] = lambda: None,
    ) -> Collected:
        """Sample and score `num_samples` rollouts of each prompt.

        Args:
            prompts: The batch.
            sampling: The distribution to draw from.
            num_samples: Rollouts per prompt.
            seed: `seed(prompt id, sample index, turn)`.
            generated: Called once, when all rows are generated and only rewards are awaited.

        Raises:
            RunError: Every program failed (`rollout-program-failed`), or a part of the framework did.
        """
        scoring = self.rewards.begin()
        order: list[tuple[int, int]] = []
        failures: dict[str, str] = {}

        async def one(index: int, prompt: Prompt) -> None:
            context = ProgramContext(
                self.template, sampling, num_samples, lambda sample, turn: seed(prompt.id, sample, turn)
            )
            try:
                rollouts = await self.program(prompt, self.engine, context)
                _check(rollouts, prompt, num_samples)
            except SurefootError:
                raise
            except (Exception, SystemExit) as error:
                failures[prompt.id] = f"{type(error).__name__}: {error}"
                return
            finally:
                self.beat()
            for rollout in rollouts:
                order.append((index, rollout.sample_index))
                scoring.add(rollout)

        try:
            async with asyncio.TaskGroup() as tasks:
                for index, prompt in enumerate(prompts):
                    tasks.create_task(one(index, prompt))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # one fault, told once
        if len(failures) == len(prompts):
            prompt_id, error = next(iter(failures.items()))
            raise RunError(
                "rollout-program-failed",
                f"the rollout program failed on every prompt of the step; on {prompt_id}: {error}",
                key="rollout.program",
            )
        generated()
        scored = await scoring.finish()
        ranked = sorted(range(len(order)), key=lambda i: order[i])
        return Collected([scored[i] for i in ranked], failures)


def step_seed(run_seed: int, number: int) -> Callable[[str, int, int], int]:
    """Return the seeds of a training step's requests, by prompt id, sample index and turn."""
    return lambda prompt_id, index, turn: derive_seed(run_seed, "rollout", number, prompt_id, index, turn)


def _check(rollouts: object, prompt: Prompt, num_samples: int) -> None:
    """What a user's program must return."""
    if not isinstance(rollouts, list) or not all(isinstance(r, Rollout) for r in rollouts):
        raise TypeError(f"the program must return a list of Rollout, not {type(rollouts).__name__}")
    if len(rollouts) != num_samples or {r.sample_index for r in rollouts} != set(range(num_samples)):
        raise ValueError(f"the program must return one rollout for each sample index 0 to {num_samples - 1}")
    for rollout in rollouts:
        columns = (rollout.token_ids, rollout.loss_mask, rollout.logprobs, rollout.policy_version)
        if len({len(column) for column in columns}) != 1:
            raise ValueError(f"the columns of a rollout differ in length: {[len(column) for column in columns]}")
        if rollout.prompt is not prompt:
            raise ValueError(f"a rollout of another prompt: {rollout.prompt.id}")
        if rollout.loss_mask[: len(prompt.token_ids)].any():
            raise ValueError("loss_mask is set within the prompt, which the policy did not choose")
        if not np.isfinite(rollout.logprobs).all():
            raise ValueError("a log-probability is not finite")
