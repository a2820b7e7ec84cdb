"""Rewards for the form of a response. They are given the response alone: a marker in the prompt cannot score."""

from __future__ import annotations

import re

from ..config.rewards import LengthReward, RegexReward
from .api import RewardFunction, RewardItem


def build_regex(spec: RegexReward, timeout_seconds: float) -> RewardFunction:
    """Return 1 for a match, else 0. White space around the response does not count."""
    pattern = re.compile(spec.pattern, re.DOTALL)
    matches = pattern.fullmatch if spec.full else pattern.search

    def regex(item: RewardItem) -> float:
        return float(matches(item.response.strip()) is not None)

    return RewardFunction(regex)


def build_length(spec: LengthReward, timeout_seconds: float) -> RewardFunction:
    """Return the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), of the tokens that the policy chose.

    Example:
        limit 100, buffer 20: 80 tokens give 0, 90 give -0.5, 100 and more give -1.
    """

    def length(item: RewardItem) -> float:
        over = item.num_model_tokens - (spec.limit - spec.buffer)
        return -min(max(over / spec.buffer, 0.0), 1.0)

    return RewardFunction(length)
