"""Rollouts made by hand."""

from __future__ import annotations

import numpy as np

from surefoot.records import FinishReason, Prompt, Reward, Rollout


def make_rollout(
    prompt_id: str = "a",
    sample_index: int = 0,
    response: str = "12",
    reward: Reward | None = None,
    finish_reason: FinishReason = "stop",
    model_tokens: int = 2,
    prompt_text: str = "7 + 5 =",
    answer: object = "12",
) -> Rollout:
    """A rollout with a prompt of 3 tokens and `model_tokens` sampled ones with logprob -0.5 by policy version 4."""
    length = 3 + model_tokens
    mask = np.arange(length) >= 3
    return Rollout(
        prompt=Prompt(prompt_id, np.arange(3, dtype=np.int32), prompt_text, (), answer, source="sums"),
        sample_index=sample_index,
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        policy_version=np.where(mask, 4, 0).astype(np.int32),
        finish_reason=finish_reason,
        response=response,
        reward=reward,
    )
