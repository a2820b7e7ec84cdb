"""`checkpoint.resume`: which checkpoint a run goes on from, or why it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError, nearest
from .layout import Found, newest, parse_name
from .store import scan


@dataclass(frozen=True, slots=True)
class Resume:
    """Where to go on from; `path` None starts at step 0. `ignored` are lines about folders that are not whole."""

    path: Path | None
    ignored: tuple[str, ...] = ()


def find_resume(folder: Path, word: str, used: bool = False) -> Resume:
    """Decide what a run goes on from.

    Args:
        folder: The run's own checkpoints.
        word: `auto`, `never`, or a path: a checkpoint, a run folder, or a folder of checkpoints.
        used: Whether the run folder holds steps of an earlier run (`RunFolder.used`).

    Raises:
        UserError: `checkpoint-none-whole`, `checkpoint-not-found`, `resume-used-folder`, `resume-newer-exists`.
    """
    if word == "never":
        if used or scan(folder):
            raise UserError(
                "resume-used-folder",
                "the run folder already holds a run, and `never` was asked for",
                key="checkpoint.resume",
                got=folder.parent,
                hint="Give this run another `name`, or set checkpoint.resume=auto to go on.",
            )
        return Resume(None)
    if word == "auto":
        return _newest_in(folder)
    if "/" not in word and not Path(word).exists():
        near = nearest(word, ["auto", "never"])
        raise UserError(
            "checkpoint-not-found",
            "there is no such folder",
            key="checkpoint.resume",
            got=word,
            want="auto, never, or the path of a checkpoint or run folder",
            hint=f"Did you mean {near}?" if near else None,
        )
    return _from_path(folder, Path(word).expanduser())


def resolve_checkpoint(path: Path) -> Resume:
    """Return the checkpoint that a path means: itself, or the newest whole one of a run or checkpoints folder.

    Raises:
        UserError: `checkpoint-not-found` or `checkpoint-none-whole`.
    """
    if not path.is_dir():
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else None
        raise UserError(
            "checkpoint-not-found",
            "there is no such folder",
            key=str(path),
            want="a checkpoint (step_000012) or a run folder",
            hint=f"Is it {path.parent / near}?" if near else None,
        )
    if parse_name(path.name) is not None:
        (one,) = [found for found in scan(path.parent) if found.name == path.name]
        if one.problem is not None:
            raise _none_whole(path.parent, [one])
        return Resume(path)
    inner = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    resume = _newest_in(inner)
    if resume.path is None:
        raise UserError("checkpoint-not-found", "there is no checkpoint in this folder", key=str(path))
    return resume


def _from_path(folder: Path, path: Path) -> Resume:
    resume = resolve_checkpoint(path)
    assert resume.path is not None
    own, step = scan(folder), parse_name(resume.path.name)
    is_own = resume.path.resolve().parent == folder.resolve()
    in_the_way = [one for one in own if one.problem is None and not (is_own and one.step <= (step or 0))]
    if in_the_way:
        raise UserError(
            "resume-newer-exists",
            "the run folder holds checkpoints that did not come before this one",
            key="checkpoint.resume",
            got=", ".join(str(folder / one.name) for one in in_the_way),
            hint="Set checkpoint.resume=auto to go on from the newest of them, or give this run another `name`.",
        )
    return resume


def _newest_in(folder: Path) -> Resume:
    found = scan(folder)
    best = newest(found)
    if best is None and found:
        raise _none_whole(folder, found)
    ignored = tuple(f"{folder / one.name} is left out: {one.problem}" for one in found if one.problem is not None)
    return Resume(folder / best.name if best else None, ignored)


def _none_whole(folder: Path, found: Sequence[Found]) -> UserError:
    return UserError(
        "checkpoint-none-whole",
        "no checkpoint here is whole",
        key=str(folder),
        got="; ".join(f"{one.name}: {one.problem}" for one in found),
        hint=f"To start from the beginning, delete {folder}.",
    )
