"""Small configurations, rollouts and columns for these tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.algorithms.columns import LossColumns
from surefoot.algorithms.resolve import resolve
from surefoot.algorithms.table import Algorithm
from surefoot.config.load import build_config
from surefoot.config.run import RunConfig
from surefoot.records import FinishReason, Prompt, Reward, Rollout


def run_config(algorithm: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """A whole configuration around an `algorithm` section. Keyword arguments replace or add sections."""
    values = {
        "model": {"path": "somewhere"},
        "data": {"sources": [{"type": "file", "path": "rows.jsonl"}]},
        "rewards": {"functions": [{"type": "exact"}]},
        "train": {"steps": 100, "samples_per_prompt": 4},
        "algorithm": algorithm or {},
    }
    return build_config(values | sections)


def algorithm(name: str = "grpo", **keys: Any) -> Algorithm:
    """A resolved algorithm, with a critic when it needs one."""
    sections = {"critic": {}} if name == "ppo" else {}
    return resolve(run_config({"name": name, **keys}, **sections))


def rollout(
    mask: Sequence[int],
    score: float | None,
    prompt: str = "p",
    finish_reason: FinishReason = "stop",
    logprobs: Sequence[float] | None = None,
) -> Rollout:
    """A trajectory with this loss mask; its prompt is the zeros in front."""
    loss_mask = np.array(mask, bool)
    length = len(loss_mask)
    prompt_length = int(loss_mask.argmax()) if loss_mask.any() else length
    return Rollout(
        prompt=Prompt(prompt, np.arange(prompt_length, dtype=np.int32), "", ()),
        sample_index=0,
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=np.zeros(length, np.float32) if logprobs is None else np.array(logprobs, np.float32),
        policy_version=np.zeros(length, np.int32),
        finish_reason=finish_reason,
        response="",
        reward=Reward(score),
    )


def random_columns(lengths: Sequence[int], weights: Sequence[float], seed: int) -> tuple[Tensor, Tensor, LossColumns]:
    """Log-probabilities and entropies (with a graph) and columns of all kinds, in float64."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def column(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    rollout_logprobs = -column().abs()
    columns = LossColumns(
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        weight_S=torch.tensor(weights, dtype=torch.float64),
        rollout_logprobs_T=rollout_logprobs,
        advantages_T=column(),
        old_logprobs_T=rollout_logprobs + column(0.3),
        ref_logprobs_T=rollout_logprobs + column(0.5),
        values_T=column(),
        returns_T=column(),
    )
    logprobs = (rollout_logprobs + column(0.3)).requires_grad_()
    return logprobs, column().abs().requires_grad_(), columns


def take(columns: LossColumns, rows: Sequence[int]) -> tuple[Tensor, LossColumns]:
    """The micro-batch of these rows, and where its tokens lie in the whole."""
    bounds = columns.cu_seqlens.tolist()
    index = torch.cat([torch.arange(bounds[row], bounds[row + 1]) for row in rows])

    def pick(x_T: Tensor | None) -> Tensor | None:
        return None if x_T is None else x_T[index]

    lengths = [bounds[row + 1] - bounds[row] for row in rows]
    part = LossColumns(
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        weight_S=columns.weight_S[list(rows)],
        rollout_logprobs_T=columns.rollout_logprobs_T[index],
        advantages_T=columns.advantages_T[index],
        old_logprobs_T=pick(columns.old_logprobs_T),
        ref_logprobs_T=pick(columns.ref_logprobs_T),
        values_T=pick(columns.values_T),
        returns_T=pick(columns.returns_T),
    )
    return index, part
