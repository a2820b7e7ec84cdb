"""`surefoot data CONFIG`: what the run's prompts look like, before any model is loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from ..config.run import RunConfig
from ..records import Ints
from .findings import duplicates, findings
from .holdout import hold_out
from .load import PromptSet, load_prompts
from .pretrained import load_tokenizer, resolve_model, stop_token_ids
from .template import Template, make_template

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_BARS = 12
_NO_LIMIT = 2**31 - 1


def report(config: RunConfig, rows: int = 2) -> RenderableType:
    """Return the report on the data of a run: `rows` prompts of each source are shown in full.

    Rows over the limit are counted, not refused, whatever `data.truncation` says.

    Raises:
        UserError: As `load_prompts`, for everything but the limit; as `resolve_model` and `load_tokenizer`.
    """
    from rich.console import Group
    from rich.text import Text

    path = resolve_model(config.model.path)
    tokenizer = load_tokenizer(path, config.model.chat_template, config.model.trust_remote_code)
    template = make_template(tokenizer, config.data.template_kwargs, stop_token_ids(path, tokenizer))
    train = load_prompts(config.data.sources, template, _NO_LIMIT)
    evaluation = load_prompts(config.eval.sources, template, _NO_LIMIT, key="eval.sources") if config.eval else None
    if config.eval is not None and evaluation is not None and config.eval.hold_out:
        train = hold_out(train, evaluation)
    sets = {"train": train} | ({"eval": evaluation} if evaluation else {})
    limit = config.data.max_prompt_length
    return Group(
        *_examples(sets, template, rows),
        _source_table(sets, limit),
        _verdict(sets, limit, config.data.truncation),
        Text(),
        _histogram(np.concatenate([part.lengths for prompts in sets.values() for part in prompts.sources]), limit),
        Text(),
        *(Text(f"! {line}", style="yellow") for line in findings(train, evaluation, template)),
    )


def _source_table(sets: dict[str, PromptSet], limit: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Prompts, lengths in tokens", title_justify="left")
    columns = ("source", "share", "rows", "shortest", "median", "longest", f"over {limit}", "no answer", "repeats")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for kind, prompts in sets.items():
        total = sum(part.weight for part in prompts.sources)
        for part in prompts.sources:
            over = int((part.lengths > limit).sum())
            table.add_row(
                Text(f"{kind}: {part.name}"),
                f"{part.weight / total:.0%}" if kind == "train" else "",
                f"{len(part.lengths)}",
                f"{part.lengths.min()}",
                f"{int(np.median(part.lengths))}",
                f"{part.lengths.max()}",
                f"{over}",
                f"{part.unanswered}",
                f"{duplicates(prompts.prompts[part.start : part.stop])}",
                style="yellow" if over else None,
            )
    return table


def _verdict(sets: dict[str, PromptSet], limit: int, truncation: str) -> Text:
    from rich.text import Text

    lengths = np.concatenate([part.lengths for prompts in sets.values() for part in prompts.sources])
    over = int((lengths > limit).sum())
    if not over:
        return Text(f"All prompts are within data.max_prompt_length = {limit}.", style="green")
    done = {"error": "the run stops before it starts", "drop": "they are dropped"}
    what = done.get(truncation, f"they are cut ({truncation})")
    text = f"{over} of {len(lengths)} prompts are over data.max_prompt_length = {limit}"
    return Text(f"{text}: with data.truncation = {truncation} {what}.", style="yellow")


def _histogram(lengths: Ints, limit: int) -> RenderableType:
    """Return bars of equal width in tokens. The limit, where it is in reach, ends one of them."""
    from rich.table import Table

    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // _BARS)
    # Bars are (edge, edge + width]; counted from the limit, so that no bar straddles it.
    first = limit - width * -(-(limit - low + 1) // width)
    edges = np.arange(first, high + width, width)
    counts = [int(((lengths > edge) & (lengths <= edge + width)).sum()) for edge in edges]
    while counts[-1] == 0:
        counts.pop()
    table = Table(title="Prompt lengths", title_justify="left", box=None, show_header=False, pad_edge=False)
    for edge, count in zip(edges.tolist(), counts, strict=False):
        span = f"{max(edge + 1, 0)} to {edge + width}" if width > 1 else f"{edge + 1}"
        bar = "█" * -(-40 * count // max(counts))
        table.add_row(span, str(count), bar, style="yellow" if edge >= limit else None)
    table.columns[0].justify = table.columns[1].justify = "right"
    return table


def _examples(sets: dict[str, PromptSet], template: Template, rows: int) -> list[RenderableType]:
    from rich.panel import Panel
    from rich.text import Text

    tokenizer = template.tokenizer
    special = {*tokenizer.all_special_tokens, *(str(token) for token in tokenizer.added_tokens_decoder.values())}
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True) if token)
    blocks: list[RenderableType] = []
    for kind, prompts in sets.items():
        for part in prompts.sources:
            for prompt in prompts.prompts[part.start : min(part.stop, part.start + rows)]:
                text = Text(_visible(prompt.text))
                if pattern:
                    text.highlight_regex(pattern, "bold magenta")
                text.append(f"\nanswer: {prompt.answer!r}", style="green" if prompt.answer is not None else "dim")
                if prompt.extra:
                    text.append(f"\nextra: {', '.join(prompt.extra)}", style="dim")
                title = Text(f"{kind}: {prompt.id}, {len(prompt.token_ids)} tokens")
                blocks.append(Panel(text, title=title, title_align="left"))
    return blocks


def _visible(text: str) -> str:
    """Return text whose control characters and odd white space can be seen; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)
