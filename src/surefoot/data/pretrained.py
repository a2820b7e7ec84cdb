"""Names of models -> what transformers can load, checked before anything heavy is loaded; and tokenizers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, nearest
from .bundled import BUNDLED, bundled_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def resolve_model(path: str, key: str = "model.path") -> str:
    """Return a folder or hub id that transformers can load.

    A folder must hold a config and a tokenizer. Of a hub id the configuration is fetched (or found in the cache), so
    that a wrong id or a missing network shows now. The name of a bundled model gives its converted folder.

    Raises:
        UserError: `model-not-found`, with the nearest thing that exists, or `model-unusable`.
    """
    if path in BUNDLED:
        return str(bundled_folder(path, key))
    folder = Path(path).expanduser()
    if folder.is_dir():
        _check_folder(folder, key)
        return str(folder)
    if folder.exists():
        raise UserError(
            "model-unusable", "this is a file; a model is a folder", key=key, got=path, hint=_file_hint(folder)
        )
    if _looks_like_path(path, folder):
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        near = nearest(folder.name, siblings)
        hint = f"Is it {folder.parent / near}?" if near else None
        raise UserError("model-not-found", "there is no such folder", key=key, got=path, hint=hint)
    _check_hub(path, key)
    return path


def load_tokenizer(
    path: str, chat_template_file: str | None = None, trust_remote_code: bool = False, key: str = "model.path"
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a resolved model, with another chat template if a Jinja file is given.

    Raises:
        UserError: `model-unusable` when it cannot be loaded; `data-template` for a template file that does not exist
            or is no Jinja.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Every kind of tokenizer fails in its own way; all of it is about this folder.
        hint = "Set model.trust_remote_code if you trust the code in it." if "trust_remote_code" in str(error) else None
        raise UserError(
            "model-unusable", f"its tokenizer cannot be loaded: {_first_line(error)}", key=key, got=path, hint=hint
        ) from None
    if chat_template_file is not None:
        tokenizer.chat_template = _read_template(Path(chat_template_file).expanduser())
    return tokenizer


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every id that ends a response: the tokenizer's, the model's and the generation configuration's.

    They often differ: a chat model's tokenizer names the end of a turn and its configuration the end of a text.
    """
    config = _read_json(path, "config.json")
    found: set[int] = set()
    for value in (
        tokenizer.eos_token_id,
        config.get("eos_token_id"),
        (config.get("text_config") or {}).get("eos_token_id"),
        _read_json(path, "generation_config.json").get("eos_token_id"),
    ):
        found |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return tuple(sorted(found))


def _check_folder(folder: Path, key: str) -> None:
    names = {p.name for p in folder.iterdir()}
    if "config.json" not in names:
        deeper = next((p.parent for p in sorted(folder.glob("*/config.json"))), None)
        hint = f"Is it {deeper}?" if deeper else None
        if "adapter_config.json" in names:
            hint = "These are LoRA adapters: name the base model, or merge them into it first."
        raise UserError(
            "model-unusable", "this folder has no config.json, so it holds no model", key=key, got=folder, hint=hint
        )
    if not names.intersection(_TOKENIZER_FILES):
        hint = "Save the tokenizer of the base model into it: tokenizer.save_pretrained(folder)."
        raise UserError(
            "model-unusable", "this folder has no tokenizer", key=key, got=folder, want="tokenizer.json", hint=hint
        )


def _file_hint(file: Path) -> str:
    if file.suffix == ".gguf":
        return "GGUF files are for inference; name the Hugging Face folder that this one was made from."
    return f"Name the folder it lies in: {file.parent}"


def _looks_like_path(path: str, folder: Path) -> bool:
    """Whether a name that does not exist was meant as a path: hub ids are `name` or `owner/name`."""
    has_shape = path.startswith((".", "/", "~")) or path.endswith("/") or "\\" in path or path.count("/") > 1
    return has_shape or ("/" in path and folder.parent.is_dir())


def _check_hub(path: str, key: str) -> None:
    from huggingface_hub import errors, hf_hub_download

    near = nearest(path, [*BUNDLED, *(p.name for p in Path.cwd().iterdir() if p.is_dir())])
    hint = f"Did you mean `{near}`?" if near else None
    code = "model-not-found"
    try:
        hf_hub_download(path, "config.json")
        return
    except errors.HFValidationError:
        message = "this is neither a folder nor a hub id"
    except errors.GatedRepoError:
        message, hint = "the hub asks for consent to its licence", "Give it on the model's page, then `hf auth login`."
    except errors.RepositoryNotFoundError:
        message, hint = "the hub has no such model", hint or "A private model needs `hf auth login`."
    except errors.LocalEntryNotFoundError:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "ON", "YES")
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        message, hint = f"{why}, and it is not in the cache", hint or "There is no folder of that name either."
    except errors.EntryNotFoundError:
        code, message = "model-unusable", "this hub repository has no config.json"
    except Exception as error:
        # A proxy, a full disk, a server's own fault: the library has no common kind for them.
        message = f"it cannot be fetched: {_first_line(error)}"
    raise UserError(code, message, key=key, got=path, hint=hint)


def _read_json(path: str, name: str) -> dict[str, Any]:
    """Return a JSON file of a model folder or of the hub's cache, {} when the model has no such file."""
    from transformers.utils.hub import cached_file

    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    file = cached_file(path, name, **quiet)  # pyright: ignore[reportArgumentType]
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}


def _read_template(file: Path) -> str:
    from jinja2 import Environment, TemplateSyntaxError

    key = "model.chat_template"
    if not file.is_file():
        near = nearest(file.name, [p.name for p in file.parent.iterdir()]) if file.parent.is_dir() else None
        hint = f"Is it {file.parent / near}?" if near else None
        raise UserError("data-template", "there is no such file", key=key, got=file, hint=hint)
    text = file.read_text(encoding="utf-8")
    try:
        # `generation` is transformers' own tag; it changes nothing that is rendered.
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_generation_tags(text))
    except TemplateSyntaxError as error:
        raise UserError(
            "data-template", f"no Jinja: {error.message} (line {error.lineno})", key=key, got=file
        ) from None
    return text


def _without_generation_tags(text: str) -> str:
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
