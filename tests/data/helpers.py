"""Tokenizers with the habits that hurt, and short ways to write sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from surefoot.config.data import FileSource
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer


def tokenizer(chat_template: str | None = CHAT_TEMPLATE, bos: bool = False) -> PreTrainedTokenizerFast:
    """A copy of the tiny tokenizer with another chat template; with `bos` it puts `<s>` before plain text by itself."""
    backend = tiny_tokenizer().backend_tokenizer
    copy = type(backend).from_str(backend.to_str())
    extra: dict[str, Any] = {}
    if bos:
        copy.add_special_tokens(["<s>"])
        copy.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", copy.token_to_id("<s>"))])
        extra["bos_token"] = "<s>"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=copy, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], **extra,
    )  # fmt: skip
    fast.chat_template = chat_template
    return fast


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def file_source(path: str | list[str], **keys: Any) -> FileSource:
    return FileSource(type="file", path=path, **keys)


# Words that a template may need in order to be told apart; tools stand before the messages, as in most of the field.
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
