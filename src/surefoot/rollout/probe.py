"""Do the sampler and the trainer compute the same model? A few rows, sampled by one and scored by the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config.rollout import SamplingConfig
from ..errors import RunError
from ..records import Floats
from .api import Completion

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest mean |difference|, by the precision of the model."""


@dataclass(frozen=True, slots=True)
class Gap:
    """|log-probability of the engine - of the trainer| over the probe's sampled tokens, in nats."""

    mean: float
    largest: float
    tokens: int


def probe_sampling(sampling: SamplingConfig, length: int = 16) -> SamplingConfig:
    """The run's own distribution without its filters, which the trainer's does not have."""
    return SamplingConfig(
        temperature=sampling.temperature, max_response_length=min(length, sampling.max_response_length)
    )


def compare(completions: Sequence[Completion], trainer: Sequence[Floats]) -> Gap:
    """Compare the engine's log-probabilities with the trainer's, `[N]` of each row's sampled tokens."""
    gaps = [np.abs(one.logprobs - other) for one, other in zip(completions, trainer, strict=True)]
    flat = np.concatenate(gaps)
    return Gap(float(flat.mean()), float(flat.max()), len(flat))


def check(gap: Gap, dtype: str, tolerance: float | None, version: int) -> None:
    """Stop a run whose sampler is another model than its trainer.

    Raises:
        RunError: `engine-trainer-gap`.
    """
    limit = tolerance or TOLERANCE[dtype]
    if not gap.mean <= limit:
        raise RunError(
            "engine-trainer-gap",
            f"engine and trainer differ under version {version} of the weights, though every tensor arrived as sent",
            key="rollout.engine.probe_tolerance",
            got=f"mean |difference| {gap.mean:.3g}, largest {gap.largest:.3g}, over {gap.tokens} tokens",
            want=f"a mean of at most {limit:g} in {dtype}",
        )
