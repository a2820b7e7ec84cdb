"""What deserves a second look in loaded prompts, as plain sentences, for the report and for the start of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..errors import UserError
from ..records import Prompt
from .load import PromptSet
from .template import Template


def findings(train: PromptSet, evaluation: PromptSet | None, template: Template) -> list[str]:
    """Return one sentence per finding: what was done to rows, repeats, contamination, and traps of the template."""
    sets = [train] if evaluation is None else [train, evaluation]
    lines = [note for prompts in sets for note in prompts.notes()]
    lines += _repeats(train.prompts)
    lines += _contamination(train.prompts, evaluation.prompts) if evaluation else []
    lines += _template_traps(template, any(prompt.tools for prompts in sets for prompt in prompts.prompts))
    return lines


def prompt_key(prompt: Prompt) -> str:
    """Return what makes two prompts the same question: white space, case and system messages aside."""
    said = (f"{m['role']}: {m['content']}" for m in prompt.messages if m["role"] not in ("system", "developer"))
    return " ".join("\n".join(said).split()).casefold()


def duplicates(prompts: Sequence[Prompt]) -> int:
    """Return how many prompts ask the same as an earlier one."""
    return len(prompts) - len({prompt_key(prompt) for prompt in prompts})


def overlap(train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> list[Prompt]:
    """Return the evaluation prompts that training has too."""
    known = {prompt_key(prompt) for prompt in train}
    return [prompt for prompt in evaluation if prompt_key(prompt) in known]


def contradictions(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts whose question an earlier prompt asks with another answer."""
    first: dict[str, str] = {}
    return [p for p in prompts if first.setdefault(prompt_key(p), repr(p.answer)) != repr(p.answer)]


def _repeats(prompts: Sequence[Prompt]) -> list[str]:
    lines: list[str] = []
    if count := duplicates(prompts):
        text, times = Counter(map(prompt_key, prompts)).most_common(1)[0]
        tail = "…" * (len(text) > 60) + text[-60:]
        lines.append(f"{count} of {len(prompts)} training prompts repeat an earlier one; {times} times: {tail!r}.")
    if wrong := contradictions(prompts):
        lines.append(f"{len(wrong)} training prompts have another answer than the same prompt before: {wrong[0].id}.")
    return lines


def _contamination(train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> list[str]:
    shared = overlap(train, evaluation)
    if not shared:
        return []
    share = f"{len(shared)} of {len(evaluation)} evaluation prompts ({len(shared) / len(evaluation):.0%})"
    return [
        f"Contamination: {share} are training prompts too, the first of them {shared[0].id}. "
        "Evaluation will take memory for skill."
    ]


def _template_traps(template: Template, has_tools: bool) -> list[str]:
    chat = str(template.tokenizer.chat_template or "")
    lines: list[str] = []
    if "strftime_now" in chat:
        lines.append(
            "The chat template writes today's date into prompts, so that a resumed run has others. A variable in "
            "data.template_kwargs (often `date_string`) fixes it."
        )
    if has_tools and "tools" not in chat:
        lines.append("Rows have tools, and the chat template does not print tools: the model will not see them.")
    end = _turn_end(template)
    if end is not None and end not in template.stop_ids:
        token = template.tokenizer.convert_ids_to_tokens(end)
        lines.append(
            f"The chat template ends a turn with {token}, which is no end-of-sequence token of this model: responses "
            f"may run on to the length limit. Add {end} to rollout.sampling.stop_token_ids."
        )
    return lines


def _turn_end(template: Template) -> int | None:
    try:
        return template.turn_end_id() if template.has_chat else None
    except UserError:
        return None
