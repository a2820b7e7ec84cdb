"""1 when the response is the answer."""

from __future__ import annotations

import re
from typing import Any

from ..config.rewards import ExactReward
from .api import RewardFunction, RewardItem


def build(spec: ExactReward, timeout_seconds: float) -> RewardFunction:
    """Return the function. It abstains on rows without an answer."""
    pattern = re.compile(spec.extract, re.DOTALL) if spec.extract is not None else None

    def exact(item: RewardItem) -> float | None:
        if item.answer is None:
            return None
        found = item.response if pattern is None else last_match(pattern, item.response)
        if found is None:
            return 0.0
        return float(_plain(found, spec) in [_plain(answer, spec) for answer in _answers(item.answer)])

    return RewardFunction(exact)


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match's first group, or the whole match where there is no group or it took no part."""
    match = None
    for match in pattern.finditer(text):  # noqa: B007
        pass
    if match is None:
        return None
    group = match.group(1) if pattern.groups else None
    return match.group() if group is None else group


def _answers(answer: Any) -> list[Any]:
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    return list(answer) if isinstance(answer, (list, tuple)) else [answer]


def _plain(value: Any, spec: ExactReward) -> str:
    text = str(value).strip()
    return text.casefold() if spec.ignore_case else text
