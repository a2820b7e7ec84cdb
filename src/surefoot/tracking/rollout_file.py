"""One step's rollouts as a parquet file: to look at, to filter, to load into pandas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..records import Floats, Rollout

if TYPE_CHECKING:
    import pyarrow as pa

PerToken = Sequence[Floats | None]


def write_rollout_file(
    path: Path,
    step: int,
    rollouts: Sequence[Rollout],
    advantages: PerToken | None = None,
    trainer_logprobs: PerToken | None = None,
) -> None:
    """Write the rollouts of a step, one row each. The file appears whole or not at all.

    Args:
        path: Where to.
        step: Written into each row, so that files can be concatenated.
        rollouts: [N].
        advantages: N arrays [L], or None where a rollout was left out of the loss. Stored as their mean over the
            model's tokens.
        trainer_logprobs: N arrays [L], or None where the trainer did not score the rollout.

    Raises:
        OSError: The disk. Nothing of the file is left.
    """
    import pyarrow.parquet as pq

    table = rollout_table(step, rollouts, advantages, trainer_logprobs)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def rollout_table(
    step: int, rollouts: Sequence[Rollout], advantages: PerToken | None = None, trainer_logprobs: PerToken | None = None
) -> pa.Table:
    """Return the rollouts as columns. Arguments as for `write_rollout_file`."""
    import pyarrow as pa

    count = len(rollouts)
    advantages = [None] * count if advantages is None else advantages
    trainer_logprobs = [None] * count if trainer_logprobs is None else trainer_logprobs
    assert len(advantages) == len(trainer_logprobs) == count
    rewards = [rollout.reward for rollout in rollouts]
    columns: dict[str, tuple[list[Any], pa.DataType]] = {
        "step": ([step] * count, pa.int32()),
        "prompt_id": ([_text(r.prompt.id) for r in rollouts], pa.string()),
        "source": ([_text(r.prompt.source) for r in rollouts], pa.string()),
        "sample_index": ([r.sample_index for r in rollouts], pa.int32()),
        "prompt": ([_text(r.prompt.text) for r in rollouts], pa.string()),
        "response": ([_text(r.response) for r in rollouts], pa.string()),
        "answer": ([_json(r.prompt.answer) for r in rollouts], pa.string()),
        "finish_reason": ([r.finish_reason for r in rollouts], pa.string()),
        "num_model_tokens": ([r.num_model_tokens for r in rollouts], pa.int32()),
        "reward": ([None if reward is None else reward.score for reward in rewards], pa.float64()),
        "error": (
            [None if reward is None or reward.error is None else _text(reward.error) for reward in rewards],
            pa.string(),
        ),
        "advantage": ([_mean_over(a, r) for a, r in zip(advantages, rollouts, strict=True)], pa.float32()),
        "token_ids": ([r.token_ids for r in rollouts], pa.list_(pa.int32())),
        "loss_mask": ([r.loss_mask for r in rollouts], pa.list_(pa.bool_())),
        "engine_logprobs": ([r.logprobs for r in rollouts], pa.list_(pa.float32())),
        "trainer_logprobs": (list(trainer_logprobs), pa.list_(pa.float32())),
        "policy_version": ([r.policy_version for r in rollouts], pa.list_(pa.int32())),
    }
    for part in sorted({name for reward in rewards if reward is not None for name in reward.parts}):
        values = [None if reward is None else reward.parts.get(part) for reward in rewards]
        columns[f"reward/{part}"] = (values, pa.float64())
    return pa.table({name: pa.array(values, type=kind) for name, (values, kind) in columns.items()})


def _mean_over(advantage: Floats | None, rollout: Rollout) -> float | None:
    if advantage is None or not rollout.loss_mask.any():
        return None
    return float(np.mean(advantage[rollout.loss_mask]))


def _text(text: str) -> str:
    # A byte-level vocabulary can sample halves of characters; parquet holds only valid UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def _json(value: Any) -> str:
    return _text(json.dumps(value, ensure_ascii=False, default=str))
