"""Symbolic equality with the answer, by math-verify."""

from __future__ import annotations

import logging
import threading
from functools import lru_cache
from typing import Any

from ..config.rewards import MathReward
from .api import RewardFunction, RewardItem


def build(spec: MathReward, timeout_seconds: float) -> RewardFunction:
    """Return the function: 1 when the response's final answer equals the row's, else 0. It abstains without an answer.

    An answer that math-verify cannot read raises ValueError (the row's error): nothing was judged, so nothing scores.
    A response that it cannot read, or not in time, scores 0.
    """
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    # It warns once that its own time limit is off, which happens only where the worker has a harder one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    boxed_first = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    share = max(1, int(0.4 * timeout_seconds))

    @lru_cache(maxsize=1024)  # Every sample of a prompt has the same answer.
    def gold_of(answer: str) -> list[Any]:
        expressions = [e for e in parse(_as_latex(answer), parsing_timeout=_alarm(share)) if not isinstance(e, str)]
        if not expressions:
            raise ValueError(f"math-verify reads no mathematics in the answer {answer!r}")
        return expressions

    def math(item: RewardItem) -> float | None:
        if item.answer is None:
            return None
        gold = gold_of(str(item.answer))
        found = parse(item.response, boxed_first, parsing_timeout=_alarm(share))
        return float(bool(found) and verify(gold, found, timeout_seconds=_alarm(share)))

    return RewardFunction(math)


def _alarm(seconds: int) -> int:
    """Return math-verify's own time limit, 0 for none: it is a SIGALRM, which only the main thread can set."""
    return seconds if threading.current_thread() is threading.main_thread() else 0


def _as_latex(answer: str) -> str:
    """Mark a bare answer as LaTeX. GSM8K's worked solutions end in `#### 72`: what follows counts."""
    answer = answer.rsplit("####", 1)[-1].strip()
    return answer if "$" in answer or "\\boxed" in answer else f"$\\boxed{{{answer}}}$"
