"""The reference page of the configuration, made from the models: `python -m surefoot.config.reference`."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .load import sections_of
from .run import RunConfig


def reference() -> str:
    """Return the page as Markdown: a table for each section, in the order of the tree."""
    lines = [
        "# Configuration",
        "",
        "Every key, its type, its default and its meaning. This page is made from the code that checks the keys.",
        "Any key can be set in the shell: `surefoot train FILE train.steps=50`. A key that is not here is an error.",
        "",
    ]
    seen: set[type[BaseModel]] = set()
    for path, section in _walk(RunConfig, ""):
        if section in seen:
            continue
        seen.add(section)
        lines += [f"## `{path}`" if path else "## Top level", "", _text(section.__doc__ or ""), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for name, field in section.model_fields.items():
            meaning = field.description or _section_text(field.annotation)
            lines.append(f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {_text(meaning)} |")
        lines.append("")
    return "\n".join(lines)


def _walk(section: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, section
    for name, field in section.model_fields.items():
        members = list(sections_of(field.annotation))
        for member in members:
            tag = member.model_fields.get("type")
            words = f" (type: {get_args(tag.annotation)[0]})" if tag is not None and len(members) > 1 else ""
            yield from _walk(member, (f"{path}.{name}" if path else name) + words)


def _type(annotation: Any) -> str:
    origin: Any = get_origin(annotation)
    if origin is Annotated:
        return _type(get_args(annotation)[0])
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        parts = ["null" if a is types.NoneType else _type(a) for a in get_args(annotation)]
        return " \\| ".join(dict.fromkeys(parts))
    if origin in (list, tuple, dict):
        inside = get_args(annotation)
        return f"{origin.__name__} of {_type(inside[-1])}" if inside else origin.__name__
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return getattr(cast("object", annotation), "__name__", str(cast("object", annotation)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        changed = value.model_dump(mode="json", exclude_unset=True)
        return f"`{json.dumps(changed)}`" if changed else "its own defaults"
    return "null" if value is None else f"`{json.dumps(value)}`"


def _section_text(annotation: Any) -> str:
    members = list(sections_of(annotation))
    return (members[0].__doc__ or "").strip().splitlines()[0] if members else ""


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference())
