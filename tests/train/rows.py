"""Samples made by hand or at random for the trainer's tests."""

from __future__ import annotations

import numpy as np

from surefoot.records import Sample

from ..tiny import tiny_tokenizer


def make_sample(
    group: str, prompt: list[int], response: list[int], advantage: float = 1.0, mask: list[int] | None = None, **fields
) -> Sample:
    """A sample whose columns are plain: log-probabilities -1, the same advantage on each model token."""
    ids = np.array([*prompt, *response], np.int32)
    loss_mask = np.zeros(len(ids), bool)
    loss_mask[len(prompt) :] = True if mask is None else np.array(mask, bool)
    column = loss_mask.astype(np.float32)
    defaults = {
        "rollout_logprobs": -column,
        "old_logprobs": None,
        "ref_logprobs": None,
        "values": None,
        "advantages": column * advantage,
        "returns": None,
    }
    return Sample(group=group, prompt_length=len(prompt), token_ids=ids, loss_mask=loss_mask, **{**defaults, **fields})


def random_samples(seed: int, groups: int = 3, samples: int = 4, longest: int = 9) -> list[Sample]:
    """Groups of samples with shared prompts and uneven responses, some of a single token."""
    rng = np.random.default_rng(seed)
    size = len(tiny_tokenizer())
    rows = []
    for g in range(groups):
        prompt = rng.integers(3, size, int(rng.integers(2, 12))).tolist()
        for _ in range(samples):
            response = rng.integers(3, size, int(rng.integers(1, longest))).tolist()
            rows.append(make_sample(f"g{g}", prompt, response, advantage=float(rng.normal())))
    return rows
