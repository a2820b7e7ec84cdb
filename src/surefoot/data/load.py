"""Sources -> prompts: what training and evaluation both begin with. Needs a tokenizer and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config.data import Source, Truncation
from ..errors import UserError
from ..records import Ints, Prompt
from .limit import apply_limit, too_long
from .rows import parse_rows
from .source import read_rows, source_names
from .template import Template


@dataclass(frozen=True, slots=True, eq=False)
class SourcePrompts:
    """The part of a `PromptSet` that comes from one source: `prompts[start:stop]`.

    `lengths` are those of all rows that were read, in tokens, before the limit.
    """

    name: str
    weight: float
    start: int
    stop: int
    lengths: Ints  # [rows]
    dropped: int
    cut: int
    repaired: int
    unanswered: int
    held_out: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PromptSet:
    """All prompts of a run, source after source. Every id is there once."""

    prompts: tuple[Prompt, ...]
    sources: tuple[SourcePrompts, ...]

    def notes(self) -> list[str]:
        """Return a line for each thing that was done to the rows: dropped, cut, repaired."""
        kinds = (
            ("dropped", "prompts were over the length limit and were dropped"),
            ("cut", "prompts were over the length limit and were cut"),
            ("held_out", "prompts are in the evaluation too and were left out of training"),
            ("repaired", "prompts held half of a character, which was replaced by U+FFFD"),
        )
        return [
            f"{source.name}: {count} of {len(source.lengths)} {what}"
            for source in self.sources
            for field, what in kinds
            if (count := getattr(source, field))
        ]


def load_prompts(
    sources: Sequence[Source],
    template: Template,
    max_prompt_length: int,
    truncation: Truncation = "error",
    answer_required: bool = False,
    key: str = "data.sources",
) -> PromptSet:
    """Read, check, render and tokenise all sources.

    Args:
        sources: `data.sources` or `eval.sources`.
        template: From `make_template`.
        max_prompt_length: Longest prompt in tokens, with everything that the chat template adds.
        truncation: What to do with a longer one.
        answer_required: Whether a reward of the run compares with the row's answer: each row must then have one.
        key: Where `sources` stands in the configuration, for errors.

    Raises:
        UserError: A `data-...` code; see `read_rows`, `parse_rows`, `Template.encode_prompts`, `apply_limit`.
    """
    # All sources are parsed before any is tokenised: a missing column must not wait for minutes of work.
    names = source_names(sources)
    parsed = [
        parse_rows(read_rows(source, f"{key}.{i}"), source, name, f"{key}.{i}", answer_required)
        for i, (source, name) in enumerate(zip(sources, names, strict=True))
    ]
    encoded = [template.encode_prompts(rows) for rows in parsed]
    everything = [prompt for made in encoded for prompt in made]
    _check_ids(everything, key)
    long = [prompt for prompt in everything if len(prompt.token_ids) > max_prompt_length]
    if long and truncation == "error":
        raise too_long(long, len(everything), max_prompt_length)
    prompts: list[Prompt] = []
    parts: list[SourcePrompts] = []
    for source, name, rows, made in zip(sources, names, parsed, encoded, strict=True):
        limited = apply_limit(made, max_prompt_length, truncation, template)
        parts.append(
            SourcePrompts(
                name=name,
                weight=source.weight,
                start=len(prompts),
                stop=len(prompts) + len(limited.prompts),
                lengths=np.asarray([len(p.token_ids) for p in made], dtype=np.int32),
                dropped=limited.dropped,
                cut=limited.cut,
                repaired=sum(row.repaired for row in rows),
                unanswered=sum(row.answer is None for row in rows),
            )
        )
        prompts += limited.prompts
    return PromptSet(tuple(prompts), tuple(parts))


def _check_ids(prompts: Sequence[Prompt], key: str) -> None:
    # Source names differ, so only a `/` in a name can make two ids equal.
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(
                "config-conflict",
                "two rows have the same id",
                key=key,
                got=prompt.id,
                hint="Give the sources other names.",
            )
        seen.add(prompt.id)
