"""The plain rollout program: every sample is one turn."""

from __future__ import annotations

import asyncio

from ..records import Prompt, Rollout
from .api import InferenceEngine, ProgramContext
from .builder import RolloutBuilder


async def single_turn(prompt: Prompt, engine: InferenceEngine, context: ProgramContext) -> list[Rollout]:
    """Sample `context.num_samples` responses to a prompt, all at once."""

    async def one(sample_index: int) -> Rollout:
        row = RolloutBuilder(prompt, sample_index, context)
        await row.sample(engine)
        return row.build()

    return list(await asyncio.gather(*map(one, range(context.num_samples))))
