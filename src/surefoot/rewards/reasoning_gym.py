"""The verifier of the reasoning-gym task that made the prompt."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from ..config.rewards import ReasoningGymReward
from .api import RewardFunction, RewardItem

# Whole numbers: not the decimals of 3.14, and in "10-5" the 5, not -5.
_INTEGER = re.compile(r"(?<![\d.])-?\d+(?!\d|\.\d)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def build(spec: ReasoningGymReward, timeout_seconds: float) -> RewardFunction:
    """Return the function. It abstains on rows of other sources.

    Some verifiers raise on text that they cannot read. When the same verifier accepts the reference answer, the text
    is at fault and scores 0; when it does not, the entry is, and the row gets an error.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # Of a package that it imports.
        import reasoning_gym as _  # noqa: F401  Two seconds that must not count as the first row's.
    extract = _EXTRACT[spec.extract]

    def reasoning_gym(item: RewardItem) -> float | None:
        entry = item.extra.get("reasoning_gym")
        if entry is None:
            return None
        params = item.extra.get("reasoning_gym_params") or {}
        score = _verifier(entry["metadata"]["source_dataset"], json.dumps(params, sort_keys=True))
        answer = extract(item.response)
        if not answer:
            return 0.0
        try:
            return float(score(answer, entry))
        except Exception:
            score(entry["answer"], entry)
            return 0.0

    return RewardFunction(reasoning_gym)


@cache
def _verifier(task: str, params: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import create_dataset

    # Some verifiers read their tolerance from the task's parameters.
    return create_dataset(task, **json.loads(params), seed=0, size=1).score_answer


def _answer_tag(text: str) -> str | None:
    found = _ANSWER_TAG.findall(text)
    return found[-1].strip() if found else None


def _last_integer(text: str) -> str | None:
    found = _INTEGER.findall(_THOUSANDS.sub("", text))
    return found[-1] if found else None


def _last_line(text: str) -> str | None:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


_EXTRACT: dict[str, Callable[[str], str | None]] = {
    "all": str.strip,
    "answer_tag": _answer_tag,
    "last_integer": _last_integer,
    "last_line": _last_line,
}
