"""Prompts over the length limit: refused, dropped or cut, and always counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..config.data import Truncation
from ..errors import UserError
from ..records import Ints, Prompt
from .template import Template


@dataclass(frozen=True, slots=True, eq=False)
class Limited:
    """Prompts within the limit, how many rows were left out, and how many were cut."""

    prompts: list[Prompt]
    dropped: int
    cut: int


def apply_limit(prompts: Sequence[Prompt], max_length: int, truncation: Truncation, template: Template) -> Limited:
    """Hold every prompt to `max_length` tokens; exactly `max_length` is within it.

    A cut keeps the leading BOS of a model that has one. The text of a cut prompt is decoded from its new ids.

    Raises:
        UserError: `data-too-long` under `error`, and under `drop` when no row is left.
    """
    long = [prompt for prompt in prompts if len(prompt.token_ids) > max_length]
    if not long:
        return Limited(list(prompts), 0, 0)
    cut = _CUTS.get(truncation)
    if cut is None and (truncation == "error" or len(long) == len(prompts)):
        raise too_long(long, len(prompts), max_length)
    if cut is None:
        return Limited([p for p in prompts if len(p.token_ids) <= max_length], dropped=len(long), cut=0)
    head = 1 if template.adds_bos and max_length > 1 else 0
    kept = [p if len(p.token_ids) <= max_length else _shorten(p, cut, max_length, head, template) for p in prompts]
    return Limited(kept, dropped=0, cut=len(long))


def too_long(long: Sequence[Prompt], total: int, max_length: int) -> UserError:
    """Return the error about the prompts `long`, of `total`."""
    longest = max(len(prompt.token_ids) for prompt in long)
    message = f"{len(long)} of {total} prompts have more tokens than this; the longest has {longest}"
    if len(long) == total:
        message += "; no prompt would be left"
    example = f"{long[0].id} with {len(long[0].token_ids)} tokens: {long[0].text[:80]!r}"
    hint = f"Set data.max_prompt_length to {longest}, or data.truncation to drop, left, right or middle."
    want = f"at most {max_length} tokens"
    return UserError("data-too-long", message, key="data.max_prompt_length", got=example, want=want, hint=hint)


def _shorten(
    prompt: Prompt, cut: Callable[[Ints, int], Ints], max_length: int, head: int, template: Template
) -> Prompt:
    ids = np.concatenate([prompt.token_ids[:head], cut(prompt.token_ids[head:], max_length - head)])
    return replace(prompt, token_ids=ids, text=str(template.tokenizer.decode(ids.tolist())))


def _middle(ids: Ints, length: int) -> Ints:
    front = (length + 1) // 2
    return np.concatenate([ids[:front], ids[len(ids) - (length - front) :]])


# What is cut away is at the named side: `left` keeps the right end.
_CUTS: dict[str, Callable[[Ints, int], Ints]] = {
    "left": lambda ids, length: ids[len(ids) - length :],
    "right": lambda ids, length: ids[:length],
    "middle": _middle,
}
