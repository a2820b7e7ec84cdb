"""Evaluation on prompts that training never sees."""

from __future__ import annotations

from dataclasses import replace

from ..errors import UserError
from ..records import Prompt
from .findings import prompt_key
from .load import PromptSet, SourcePrompts


def hold_out(train: PromptSet, evaluation: PromptSet) -> PromptSet:
    """Return the training prompts without those that the evaluation asks too: held out means held out.

    Raises:
        UserError: Nothing is left of a source (`data-empty`).
    """
    asked = {prompt_key(prompt) for prompt in evaluation.prompts}
    prompts: list[Prompt] = []
    parts: list[SourcePrompts] = []
    for part in train.sources:
        kept = [prompt for prompt in train.prompts[part.start : part.stop] if prompt_key(prompt) not in asked]
        if not kept:
            raise UserError(
                "data-empty",
                f"every prompt of {part.name} is in the evaluation too, so none is left to train on",
                key="eval.hold_out",
                hint="Evaluate on other rows, or set eval.hold_out=false to train on them all the same.",
            )
        held = part.stop - part.start - len(kept)
        parts.append(replace(part, start=len(prompts), stop=len(prompts) + len(kept), held_out=held))
        prompts += kept
    return PromptSet(tuple(prompts), tuple(parts))
