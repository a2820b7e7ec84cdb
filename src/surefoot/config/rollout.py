"""`rollout`: how the policy is sampled."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from .base import Fraction, NonNegative, NonNegativeFloat, Positive, Section


class SamplingConfig(Section):
    """The distribution that tokens are drawn from. Log-probabilities are always of this distribution."""

    temperature: NonNegativeFloat = 1.0
    """Divides the logits, in the sampler and in every log-probability of the trainer. 0 is greedy (evaluation only)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: NonNegative = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: Fraction = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    max_response_length: Positive = 512
    """Most new tokens of a response."""
    stop: list[str] = Field(default_factory=list[str])
    """Strings that end a response; the matched text stays in it."""
    stop_token_ids: list[int] = Field(default_factory=list[int])
    """Token ids that end a response, beside the model's own end-of-sequence ids."""


class EvalSamplingConfig(SamplingConfig):
    """Sampling of evaluation: greedy unless you say otherwise."""

    temperature: NonNegativeFloat = 0.0
    """Divides the logits; 0 takes the likeliest token."""


class RolloutConfig(Section):
    """The sampling engine and the program that drives it."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training rollouts."""
    max_concurrent_rows: Positive = 64
    """How many rows decode together; waiting rows take the place of those that stop."""
    program: str = "single_turn"
    """`single_turn`, or your own async function as `package.module:function` or `file.py:function`."""
    program_params: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of the program."""
