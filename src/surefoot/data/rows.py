"""A row of a source, taken apart: prompt, answer, tools, id, and the rest. Columns are looked up here, nowhere else."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.data import SourceBase
from ..errors import UserError, nearest
from .files import Row

ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "reward_model.ground_truth")
_USUAL_PROMPTS = (
    "question",
    "problem",
    "messages",
    "conversations",
    "instruction",
    "query",
    "input",
    "text",
    "content",
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MISSING = object()


@dataclass(frozen=True, slots=True, eq=False)
class ParsedRow:
    """A row whose parts are checked and not yet rendered.

    `is_text` says that the prompt was a string and not a list of messages. `repaired` says that text of the prompt
    held half of a character (a lone surrogate), which no tokenizer can encode; U+FFFD stands in its place.
    """

    id: str
    source: str
    messages: tuple[Mapping[str, Any], ...]
    is_text: bool
    answer: Any
    tools: tuple[Mapping[str, Any], ...]
    extra: Mapping[str, Any]
    repaired: bool


def parse_rows(
    rows: Sequence[Row], source: SourceBase, name: str, key: str, answer_required: bool = False
) -> list[ParsedRow]:
    """Take the rows of one source apart.

    A row's `id` column is its id where all rows have one and no two are equal; otherwise its index is. `tools` (a list
    of JSON schemas, or JSON text of one) goes to `tools`; `data_source`, where a row has one, is its source's name.
    `extra` holds every other column as it was read. In messages and tools an entry of value None is left out: a
    parquet file cannot say "absent" in any other way, and a template would print it.

    Raises:
        UserError: `data-column` when the prompt's or a needed answer's column is missing, in all rows or in some;
            `data-prompt` for a prompt that is empty or has another shape than text or chat messages.
    """
    columns = _columns(rows)
    _require_prompt(rows, source, name, columns, key)
    answer_column = _answer_column(rows, source, name, columns, key, answer_required)
    own = {source.prompt_column, answer_column, "tools"}
    parsed: list[ParsedRow] = []
    for index, (row, row_id) in enumerate(zip(rows, _row_ids(rows), strict=True)):
        where, repairs = f"row {index} of {name}", []
        prompt = _decoded(_tidy(_lookup(row, source.prompt_column), repairs))
        messages = _messages(prompt, source, where, key)
        answer = _lookup(row, answer_column) if answer_column else None
        parsed.append(
            ParsedRow(
                id=f"{name}/{row_id}",
                source=row["data_source"] if isinstance(row.get("data_source"), str) else name,
                messages=tuple(messages),
                is_text=isinstance(prompt, str),
                answer=None if answer is _MISSING else answer,
                tools=_tools(row.get("tools"), repairs, where, key),
                extra={column: value for column, value in row.items() if column not in own},
                repaired=bool(repairs),
            )
        )
    return parsed


def _lookup(row: Row, column: str) -> Any:
    """Return the value at a column, or at a dotted path into nested dicts, or `_MISSING`. None counts as missing."""
    if column in row:
        return _MISSING if row[column] is None else row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            return _MISSING
        value = value[part]
    return value


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return all columns of all rows, and `column.field` for those that hold dicts."""
    found: dict[str, None] = {}
    for row in rows:
        for column, value in row.items():
            found[column] = None
            if isinstance(value, Mapping):
                found |= {f"{column}.{field}": None for field in value}
    return list(found)


def _require_prompt(rows: Sequence[Row], source: SourceBase, name: str, columns: list[str], key: str) -> None:
    column = source.prompt_column
    without = [index for index, row in enumerate(rows) if _lookup(row, column) is _MISSING]
    if not without:
        return
    if len(without) < len(rows):
        message = f"{len(without)} of {len(rows)} rows of {name} have no `{column}`, the first of them row {without[0]}"
        raise UserError("data-column", message, key=f"{key}.prompt_column", got=", ".join(rows[without[0]]))
    near = nearest(column, columns) or next((usual for usual in _USUAL_PROMPTS if usual in columns), None)
    hint = f"Did you mean `prompt_column: {near}`?" if near else None
    raise UserError(
        "data-column",
        f"{name} has no such column",
        key=f"{key}.prompt_column",
        got=", ".join(columns),
        want=column,
        hint=hint,
    )


def _answer_column(
    rows: Sequence[Row], source: SourceBase, name: str, columns: list[str], key: str, required: bool
) -> str | None:
    """Return the column of the answers, or None when there is none and none is needed."""
    wanted = (source.answer_column,) if source.answer_column else ANSWER_COLUMNS
    for column in wanted:
        without = [index for index, row in enumerate(rows) if _lookup(row, column) is _MISSING]
        if len(without) == len(rows):
            continue
        if without and required:
            message = (
                f"{len(without)} of {len(rows)} rows of {name} have no `{column}`, the first of them row {without[0]}"
            )
            raise UserError(
                "data-column", message, key=f"{key}.answer_column", hint="A reward of this run compares with it."
            )
        return column
    if not required and not source.answer_column:
        return None
    near = nearest(wanted[0], columns)
    hint = (
        f"Did you mean `answer_column: {near}`?"
        if near
        else "Set answer_column to the column with the reference answer."
    )
    why = " and a reward of this run needs an answer" if required else ""
    message = f"{name} has no such column{why}"
    raise UserError(
        "data-column", message, key=f"{key}.answer_column", got=", ".join(columns), want=" or ".join(wanted), hint=hint
    )


def _row_ids(rows: Sequence[Row]) -> list[str]:
    ids = [row.get("id") for row in rows]
    if all(isinstance(i, (str, int)) and i != "" for i in ids) and len({str(i) for i in ids}) == len(ids):
        return [str(i) for i in ids]
    return [str(index) for index in range(len(rows))]


def _tidy(value: Any, repairs: list[str]) -> Any:
    """Return a copy without None entries in dicts and lone surrogates in text; what was repaired goes to `repairs`."""
    if isinstance(value, str):
        if not _SURROGATE.search(value):
            return value
        repairs.append(value)
        # Two halves that belong together become the character they stand for.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {k: _tidy(v, repairs) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_tidy(v, repairs) for v in value]
    return value


def _messages(prompt: Any, source: SourceBase, where: str, key: str) -> list[dict[str, Any]]:
    """Return chat messages with text as content, the source's system prompt and suffix among them."""
    key = f"{key}.prompt_column"
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("data-prompt", f"{where} has an empty prompt", key=key, got=repr(prompt))
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list):
        messages = [_message(message, f"message {i} of {where}", key) for i, message in enumerate(prompt)]
        _check_conversation(messages, where, key)
    else:
        raise UserError(
            "data-prompt",
            f"{where} has a prompt of the wrong type",
            key=key,
            got=type(prompt).__name__,
            want="text or messages",
        )
    if source.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": source.system_prompt})
    if source.prompt_suffix:
        last = next((m for m in reversed(messages) if m["role"] == "user"), None)
        if last is None:
            raise UserError("data-prompt", f"{where} has no user message to put prompt_suffix behind", key=key)
        last["content"] += source.prompt_suffix
    return messages


def _decoded(prompt: Any) -> Any:
    # Files without nested types (csv) carry messages as JSON text; any other text stays what it is.
    if not isinstance(prompt, str) or not prompt.lstrip().startswith("[{"):
        return prompt
    try:
        decoded = json.loads(prompt)
    except json.JSONDecodeError:
        return prompt
    is_chat = isinstance(decoded, list) and all(isinstance(m, dict) and "role" in m for m in decoded)
    return _tidy(decoded, []) if is_chat else prompt


def _message(message: Any, where: str, key: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        got = ", ".join(map(str, message)) if isinstance(message, dict) else type(message).__name__
        hint = (
            "`from` and `value` are another format: rename them."
            if isinstance(message, dict) and "from" in message
            else None
        )
        raise UserError("data-prompt", f"{where} has no role", key=key, got=got, want="role, content", hint=hint)
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""
    elif isinstance(content, list) and message["role"] != "tool":
        content = "".join(_part(part, where, key) for part in content)
    # A tool may answer with an object: templates print it as JSON.
    if not isinstance(content, str) and not (message["role"] == "tool" and isinstance(content, (dict, list))):
        raise UserError(
            "data-prompt",
            f"{where} has no text",
            key=key,
            got=type(content).__name__,
            want="content: text, or a list of text parts",
        )
    return {**message, "content": content}


def _part(part: Any, where: str, key: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        got = part.get("type", ", ".join(map(str, part))) if isinstance(part, dict) else type(part).__name__
        raise UserError(
            "data-prompt", f"{where} has a part that is not text", key=key, got=got, want="parts of type text"
        )
    return text


def _check_conversation(messages: list[dict[str, Any]], where: str, key: str) -> None:
    if not messages or (messages[-1]["role"] == "user" and not messages[-1]["content"].strip()):
        raise UserError("data-prompt", f"{where} has an empty prompt", key=key, got=messages or "no messages")
    if messages[-1]["role"] == "assistant":
        # Nearly always a column made for supervised training: the policy would be shown the answer.
        hint = "Leave the answer out of the prompt; keep it in the answer column."
        raise UserError(
            "data-prompt",
            f"{where} ends with a message of the assistant",
            key=key,
            want="user or tool message last",
            hint=hint,
        )


def _tools(value: Any, repairs: list[str], where: str, key: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value) if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        hint = "If this column is something else, rename it."
        raise UserError("data-prompt", f"`tools` of {where} is no list of tool schemas", key=key, got=value, hint=hint)
    return tuple(_tidy(value, repairs))
