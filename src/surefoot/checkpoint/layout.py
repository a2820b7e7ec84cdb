"""How checkpoints lie in their folder, as pure functions: names, the manifest, what is whole, what may go.

    checkpoints/step_000012/manifest.json  actor.safetensors  actor_optimizer.safetensors  ...  state.json  config.yaml

A checkpoint is whole when its manifest is there and every file in it has the size that it says. The manifest is
written last. Nothing points at "the latest" checkpoint, so nothing can point at a wrong one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"
KEEP = "KEEP"
_NAME = re.compile(r"(?:step_(?P<step>\d{6,})|\.step_(?P<unfinished>\d{6,})\.tmp)")


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint.

    Example:
        folder_name(12) == "step_000012"
    """
    return f"step_{step:06d}"


def unfinished_name(step: int) -> str:
    """Return the name under which a checkpoint is written before it gets its own."""
    return f".{folder_name(step)}.tmp"


def parse_name(name: str) -> int | None:
    """Return the step that a folder's name tells, of finished and unfinished ones; None for other names."""
    match = _NAME.fullmatch(name)
    return int(match["step"] or match["unfinished"]) if match else None


def digest(content: bytes) -> str:
    """Return the digest that configurations are compared by."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: size in bytes, blake2b digest (16 bytes, hexadecimal)."""

    size: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a whole checkpoint consists of, and what it was made with."""

    step: int
    files: Mapping[str, FileEntry]
    versions: Mapping[str, str]
    config_hash: str
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Read `manifest.json`. Raises ValueError, saying what is wrong with it."""
        try:
            tree: dict[str, Any] = json.loads(text)
            if tree["format"] > FORMAT:
                raise ValueError(f"written by a newer Surefoot (format {tree['format']}, this one reads {FORMAT})")
            files = {
                name: FileEntry(int(entry["size"]), str(entry["blake2b"])) for name, entry in tree["files"].items()
            }
            return Manifest(
                int(tree["step"]), files, dict(tree["versions"]), str(tree["config_hash"]), int(tree["format"])
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its manifest lacks {error}") from None
        except json.JSONDecodeError:
            raise ValueError("its manifest is cut short") from None


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint folder. `problem` says why it is not whole; None when it is."""

    name: str
    step: int
    problem: str | None
    pinned: bool = False


def judge(name: str, manifest: str | None, sizes: Mapping[str, int]) -> Found | None:
    """Say whether a folder is a whole checkpoint.

    Args:
        name: The folder's name.
        manifest: The text of its manifest; None when it has none.
        sizes: Size in bytes of each file in it.

    Returns:
        None when the name is not a checkpoint's.
    """
    step = parse_name(name)
    if step is None:
        return None
    return Found(name, step, _problem(step, manifest, sizes), pinned=KEEP in sizes)


def _problem(step: int, manifest: str | None, sizes: Mapping[str, int]) -> str | None:
    if manifest is None:
        return "it has no manifest: writing it was interrupted"
    try:
        content = Manifest.from_json(manifest)
    except ValueError as error:
        return str(error)
    if content.step != step:
        return f"its manifest is of step {content.step}"
    for file, entry in content.files.items():
        if file not in sizes:
            return f"{file} is missing"
        if sizes[file] != entry.size:
            return f"{file} has {sizes[file]} bytes, not {entry.size}"
    return None


def newest(found: Sequence[Found]) -> Found | None:
    """Return the whole checkpoint of the highest step; a finished folder before an unfinished one of the same step."""
    whole = [one for one in found if one.problem is None]
    return max(whole, key=lambda one: (one.step, not one.name.startswith(".")), default=None)


def removable(found: Sequence[Found], keep_last: int) -> list[str]:
    """Return the folders that may go: whole ones but the `keep_last` newest and the pinned, and broken older ones.

    Nothing may go while no checkpoint is whole. Broken folders newer than the newest whole one stay, for people.
    """
    best = newest(found)
    if best is None:
        return []
    loose = sorted(
        (one for one in found if one.problem is None and not one.pinned), key=lambda one: (one.step, one.name)
    )
    old = [one.name for one in loose[: -max(1, keep_last)] if one.name != best.name]
    return old + [one.name for one in found if one.problem is not None and one.step <= best.step]
