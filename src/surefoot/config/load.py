"""YAML file + `key.sub=value` overrides -> RunConfig, with errors that name the nearest right key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..errors import UserError, nearest
from .run import RunConfig
from .verl import verl_hint, verl_hint_by_word, verl_leaves


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file and apply overrides of the form `train.steps=20`.

    Raises:
        UserError: The file is missing or no YAML mapping, an override has no `=`, a key is unknown, or a value is
            refused. All faults of the file are listed in one error.
    """
    file = Path(path)
    if not file.is_file():
        near = nearest(file.name, [p.name for p in file.parent.glob("*.y*ml")]) if file.parent.is_dir() else None
        hint = f"Is it {file.parent / near}?" if near else None
        raise UserError("config-file", "there is no such file", key=str(path), hint=hint)
    try:
        tree = OmegaConf.load(file)
        if not isinstance(tree, DictConfig):
            raise UserError(
                "config-file", "the file must hold a mapping of keys", key=str(path), got=type(tree).__name__
            )
        for override in overrides:
            key, equals, _ = override.partition("=")
            if not equals or not key:
                raise UserError(
                    "config-bad-value", "an override needs a key, `=` and a value", key=override, want="key.sub=value"
                )
        tree.merge_with_dotlist([_without_plus(override) for override in overrides])
        values = OmegaConf.to_container(tree, resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError("config-file", f"not readable: {error}", key=str(path)) from None
    return build_config(values)


def build_config(values: object) -> RunConfig:
    """Validate a plain tree of values. Raises UserError with every fault in it."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        faults = [_describe(detail) for detail in error.errors(include_url=False)]
    code = next((c for c, _ in faults if c == "config-unknown-key"), faults[0][0])
    raise UserError(code, "\n".join(text for _, text in faults))


def to_yaml(config: BaseModel) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def all_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield `(dotted key, section, field)` of every key of the tree, members of unions included."""
    for name, field in model.model_fields.items():
        yield prefix + name, model, name
        for section in sections_of(field.annotation):
            yield from all_keys(section, f"{prefix}{name}.")


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a key's type is made of: itself, or the members of its union or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_of(argument)


def _without_plus(override: str) -> str:
    # Hydra users write `+key=value` to add a key; here adding and changing are one thing, and both are checked.
    return override.lstrip("+")


def _describe(detail: ErrorDetails) -> tuple[str, str]:
    """Return the error's code and a line for it."""
    unknown = detail["type"] == "extra_forbidden"
    key = _dotted(detail["loc"], unknown)
    if unknown:
        # A whole section of verl's is told key by key: a script that was brought along has dozens.
        keys = list(verl_leaves(key, detail["input"])) or [key]
        return "config-unknown-key", "\n".join(f"{one}: no such key. {_did_you_mean(one)}" for one in keys)
    if detail["type"] == "missing":
        return "config-bad-value", f"{key}: this key is required and has no value"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return "config-bad-value", f"{key}: {message} (got {detail['input']!r})"


def _dotted(location: tuple[int | str, ...], last_is_unknown: bool) -> str:
    """Join a pydantic location, leaving out the tags of unions, which no user wrote."""
    parts: list[str] = []
    for index, part in enumerate(location):
        is_key = part in _FIELD_NAMES and not (index > 0 and isinstance(location[index - 1], int))
        is_unknown = last_is_unknown and index == len(location) - 1
        if isinstance(part, int) or is_key or is_unknown:
            parts.append(str(part))
    return ".".join(parts)


def _did_you_mean(key: str) -> str:
    """Point at the nearest key: a typing mistake in its own section first, then the same name elsewhere."""
    plain = ".".join(part for part in key.split(".") if not part.isdigit())
    if hint := verl_hint(plain):
        return hint
    section, _, name = plain.rpartition(".")
    known = [dotted for dotted, _, _ in all_keys()]
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    if near := nearest(name, siblings, 0.75):
        return f"Did you mean `{section + '.' if section else ''}{near}`?"
    if elsewhere := next((k for k in known if k.rpartition(".")[2] == name), None):
        return f"That key lives at `{elsewhere}`."
    if hint := verl_hint_by_word(name):
        return hint
    if near := nearest(name, siblings):
        return f"Did you mean `{section + '.' if section else ''}{near}`?"
    if near := nearest(plain, known):
        return f"Did you mean `{near}`?"
    return f"Keys of this section: {', '.join(siblings)}." if siblings else "There is no such section."


_FIELD_NAMES = {name for _, _, name in all_keys()}
