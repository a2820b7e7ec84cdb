"""The only place where text becomes tokens: prompts at a run's start, and what stands between a model's own turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError, nearest
from ..records import Ints, Prompt
from .rows import ParsedRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

# A word that no template looks for, trims or splits.
_MARK = "surefootmarkxq"
_RESERVED = {
    "conversation",
    "messages",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
}


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A tokenizer with the variables its chat template gets. Build it with `make_template`.

    `adds_bos` says that the tokenizer puts its BOS before plain text; then every prompt begins with exactly one,
    whether the chat template writes it or not. `content_parts` says that the template prints message content only
    when it is a list of parts.
    """

    tokenizer: PreTrainedTokenizerBase
    kwargs: Mapping[str, Any]
    stop_ids: frozenset[int]
    adds_bos: bool
    content_parts: bool

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.tokenizer.chat_template)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation as the chat template writes it.

        Raises:
            UserError: `data-template` when the template refuses the messages or there is none.
        """
        if not self.has_chat:
            hint = "Set model.chat_template to a Jinja file, or give prompts as plain text."
            raise UserError(
                "data-template",
                "prompts are chat messages, and this model has no chat template",
                key="model.chat_template",
                hint=hint,
            )
        try:
            return self._render(messages, tools, add_generation_prompt)
        except Exception as error:
            # Templates raise by design (roles that must alternate) and by accident (a type they did not expect).
            message = f"the chat template refuses the messages: {type(error).__name__}: {error}"
            got = ", ".join(str(m.get("role")) for m in messages)
            raise UserError("data-template", message, key="model.chat_template", got=got) from None

    def _render(self, messages: Sequence[Message], tools: Sequence[Message], add_generation_prompt: bool) -> str:
        if self.content_parts:
            messages = [{**m, "content": _as_parts(m.get("content"))} for m in messages]
        rendered = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            tools=[dict(t) for t in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.kwargs,
        )
        assert isinstance(rendered, str)
        return rendered

    def encode(self, texts: Sequence[str]) -> list[Ints]:
        """Return the ids `[P]` of each text. No special token is added that the text does not hold."""
        batches = (texts[i : i + 4096] for i in range(0, len(texts), 4096))
        return [np.asarray(ids, dtype=np.int32) for batch in batches for ids in self._encode_batch(list(batch))]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        out = self.tokenizer(
            texts, add_special_tokens=False, padding=False, truncation=False, return_attention_mask=False,
            return_token_type_ids=False, verbose=False,
        )  # fmt: skip
        return out["input_ids"]  # pyright: ignore[reportReturnType]

    def encode_prompts(self, rows: Sequence[ParsedRow]) -> list[Prompt]:
        """Render and tokenise rows, whatever their length.

        A string prompt is one user message where there is a chat template. Where there is none it is encoded as it
        stands, after the system prompt and an empty line if the source has one.

        Raises:
            UserError: `data-template`, naming the row.
        """
        texts = [self._text(row) for row in rows]
        prompts: list[Prompt] = []
        for row, text, ids in zip(rows, texts, self.encode(texts), strict=True):
            text, ids = self._one_bos(text, ids)
            # fmt: off
            prompts.append(Prompt(
                id=row.id, token_ids=ids, text=text, messages=row.messages, answer=row.answer,
                source=row.source, extra=row.extra, tools=row.tools,
            ))
            # fmt: on
        return prompts

    def _text(self, row: ParsedRow) -> str:
        if not self.has_chat and row.is_text:
            return "\n\n".join(m["content"] for m in row.messages)
        try:
            return self.render(row.messages, row.tools)
        except UserError as error:
            raise UserError(
                error.code, f"{row.id}: {error.message}", error.key, error.got, error.want, error.hint
            ) from None

    def _one_bos(self, text: str, ids: Ints) -> tuple[str, Ints]:
        """Return text and ids with exactly one BOS at the start, if this is a model that has one there."""
        if not self.adds_bos:
            return text, ids
        bos, bos_id = str(self.tokenizer.bos_token), int(self.tokenizer.bos_token_id)  # pyright: ignore[reportArgumentType]
        have = 0
        while have < len(ids) and ids[have] == bos_id:
            have += 1
        # By ids, not by text: some tokenizers encode a word after a written BOS in another way than at the start.
        ids = np.concatenate([np.asarray([bos_id], dtype=np.int32), ids[have:]])
        return bos + text[have * len(bos) :], ids

    def next_turn(
        self, messages: Sequence[Message], generated: Ints, new: Sequence[Message], tools: Sequence[Message] = ()
    ) -> Ints:
        """Return the ids to put behind the model's own tokens so that it can take its next turn.

        What the model sampled is never tokenised again: the result holds only what the template writes after the
        assistant's content: the turn's end (unless the model sampled it), the separator, `new`, and the generation
        prompt. All of it is masked. The conversation's ids are then `prompt + generated + result`.

        Args:
            messages: The conversation so far. Its last message is the assistant's that `generated` was parsed to, with
                its `tool_calls`, as have all earlier ones; its text is not read.
            generated: What the model sampled in this turn `[N]`, its stop token included if it came to one.
            new: The tool, user or environment messages that follow.
            tools: The row's tool schemas.

        Raises:
            UserError: `data-template` when the template refuses the conversation or hides the assistant's text.

        Example:
            ChatML, generated "4<|im_end|>": "\\n<|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n".
            Cut at the limit, generated "4": the same with "<|im_end|>" before it.
        """
        assert messages[-1]["role"] == "assistant", "the last message is the one that was generated"
        assert len(new) > 0
        ids = self.encode([self._after_assistant(messages, new, tools)])[0]
        if len(generated) == 0 or int(generated[-1]) not in self.stop_ids:
            return ids
        ends = np.flatnonzero(ids == generated[-1])
        # The template may write white space before the turn's end; the model ended its turn without it.
        if len(ends) and not str(self.tokenizer.decode(ids[: ends[0]].tolist())).strip():
            return ids[ends[0] + 1 :]
        return ids

    def _after_assistant(self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Message]) -> str:
        """Return what the template writes from the end of the last assistant message's text on."""
        marked = {**messages[-1], "content": _MARK}
        plain = {
            k: v for k, v in marked.items() if k not in ("tool_calls", "reasoning_content", "reasoning", "thinking")
        }
        refused: UserError | None = None
        # The model's text holds its calls, so the template must not write them once more ...
        try:
            _, found, rest = self.render([*messages[:-1], plain, *new], tools).rpartition(_MARK)
            if found:
                return rest
        except UserError as error:
            refused = error
        # ... unless it wants to see calls before it takes a tool message; then the text goes on at the turn's end.
        _, found, rest = self.render([*messages[:-1], marked, *new], tools).rpartition(_MARK)
        end = re.search("|".join(re.escape(str(self.tokenizer.decode([i]))) for i in sorted(self.stop_ids)), rest)
        if found and end:
            return rest[end.start() :]
        raise refused or UserError(
            "data-template", "the chat template does not show what the assistant said", key="model.chat_template"
        )

    def turn_end_id(self) -> int | None:
        """Return the special token that the template writes right after an assistant's text, or None."""
        history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        rest = self._after_assistant(history, [{"role": "user", "content": "c"}], ())
        ids = self.encode([rest.lstrip()])[0]
        first = int(ids[0]) if len(ids) else -1
        return (
            first if first in self.tokenizer.all_special_ids or first in self.tokenizer.added_tokens_decoder else None
        )


def make_template(
    tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None, stop_ids: Sequence[int] = ()
) -> Template:
    """Return the template of a tokenizer.

    Args:
        tokenizer: As `load_tokenizer` gives it.
        kwargs: Variables for the chat template (`data.template_kwargs`).
        stop_ids: The ids that end a turn (`stop_token_ids`); the tokenizer's own end-of-sequence id is always one.

    Raises:
        UserError: `config-bad-value` for a variable that the chat template does not read.
    """
    kwargs = dict(kwargs or {})
    _check_kwargs(tokenizer, kwargs)
    eos = tokenizer.eos_token_id
    stops = frozenset(stop_ids) | (frozenset([eos]) if isinstance(eos, int) else frozenset())
    with_special = list(tokenizer("a")["input_ids"])  # pyright: ignore[reportArgumentType]
    adds_bos = tokenizer.bos_token_id is not None and with_special[:1] == [tokenizer.bos_token_id]
    template = Template(tokenizer, kwargs, stops, adds_bos, content_parts=False)
    parts = Template(tokenizer, kwargs, stops, adds_bos, content_parts=True)
    if not template.has_chat or _shows(template):
        return template
    if _shows(parts):
        return parts
    raise UserError(
        "data-template",
        "the chat template does not show what the user says: every prompt would be the same",
        key="model.chat_template",
        got=str(tokenizer.chat_template)[:200],
    )


def _shows(template: Template) -> bool:
    try:
        return _MARK in template.render([{"role": "user", "content": _MARK}])
    except UserError:
        return False


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _check_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    text = tokenizer.chat_template or ""
    text = text if isinstance(text, str) else "\n".join(text.values())
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    for name in kwargs:
        if name in _RESERVED or name not in words:
            near = nearest(name, words)
            hint = f"Did you mean `{near}`?" if near and name not in _RESERVED else None
            raise UserError(
                "config-bad-value",
                "the chat template has no such variable",
                key="data.template_kwargs",
                got=name,
                hint=hint,
            )
