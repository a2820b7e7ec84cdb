"""`checkpoint.resume`: which checkpoint a run goes on from, or why it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError, nearest
from .layout import parse_name
from .store import Checkpoint, load, newest_checkpoint, scan, set_aside


@dataclass(frozen=True, slots=True)
class Resume:
    """What to go on from; None starts at step 0. `ignored` are lines about folders that are no whole checkpoints."""

    checkpoint: Checkpoint | None
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
        return _newest_of_run(folder)
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


def resolve_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint that a path means: itself, or the newest whole one of a run or checkpoints folder.

    Raises:
        UserError: `checkpoint-not-found` or `checkpoint-none-whole`.
        RunError: `checkpoint-corrupt`: the path is a checkpoint, and damaged.
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
            raise _none_whole(path.parent, {one.name: one.problem})
        return load(path)
    inner = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoint, problems = newest_checkpoint(inner)
    if checkpoint is None and problems:
        raise _none_whole(inner, problems)
    if checkpoint is None:
        raise UserError("checkpoint-not-found", "there is no checkpoint in this folder", key=str(path))
    return checkpoint


def _from_path(folder: Path, path: Path) -> Resume:
    checkpoint = resolve_checkpoint(path)
    own, step = scan(folder), checkpoint.manifest.step
    is_own = checkpoint.path.resolve().parent == folder.resolve()
    in_the_way = [one for one in own if one.problem is None and not (is_own and one.step <= step)]
    if in_the_way:
        raise UserError(
            "resume-newer-exists",
            "the run folder holds checkpoints that did not come before this one",
            key="checkpoint.resume",
            got=", ".join(str(folder / one.name) for one in in_the_way),
            hint="Set checkpoint.resume=auto to go on from the newest of them, or give this run another `name`.",
        )
    return Resume(checkpoint)


def _newest_of_run(folder: Path) -> Resume:
    checkpoint, problems = newest_checkpoint(folder)
    if checkpoint is None and problems:
        raise _none_whole(folder, problems)
    whole = {one.name for one in scan(folder) if one.problem is None}
    ignored: list[str] = []
    for name, problem in problems.items():
        path = folder / name
        if name in whole:  # by its sizes: it would be kept, and a good one deleted for it
            path = set_aside(path)
        ignored.append(f"{path} is left out: {problem}")
    return Resume(checkpoint, tuple(ignored))


def _none_whole(folder: Path, problems: Mapping[str, str]) -> UserError:
    return UserError(
        "checkpoint-none-whole",
        "no checkpoint here is whole",
        key=str(folder),
        got="; ".join(f"{name}: {problem}" for name, problem in problems.items()),
        hint=f"To start from the beginning, delete {folder}.",
    )
