"""Every kind of source, as one list of rows: plain Python dicts, in a stable order."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..config.data import FileSource, HubSource, PythonSource, ReasoningGymSource, Source
from ..errors import UserError, nearest
from ..plugins import describe_failure, load_function
from .files import Row, read_files


def read_rows(source: Source, key: str) -> list[Row]:
    """Return the rows of a source, at most `source.limit`. `key` is its place in the configuration, for errors.

    Values are plain Python (lists, dicts, str, bool, int, float, None): no numpy or arrow type leaves here.

    Raises:
        UserError: `data-missing`, `data-unreadable` or `data-empty`; `plugin-not-found` or `plugin-broken` for a
            function.
    """
    return _READERS[type(source)](source, key)


def source_names(sources: Iterable[Source]) -> list[str]:
    """Return a different name for each source: its own, or one made from its file, dataset, task or function.

    Raises:
        UserError: `config-conflict` when two sources were given the same name.
    """
    names: list[str] = []
    explicit: set[str] = set()
    for source in sources:
        if source.name in explicit:
            raise UserError(
                "config-conflict", f"two sources have the name `{source.name}`", key="name", want="different names"
            )
        if source.name:
            explicit.add(source.name)
    for source in sources:
        name, count = source.name or _NAMES[type(source)](source), 2
        base = name
        while name in names or (not source.name and name in explicit):
            name, count = f"{base}-{count}", count + 1
        names.append(name)
    return names


def plain(value: Any) -> Any:
    """Return `value` with numpy arrays and scalars, tuples and foreign mappings made plain Python, all the way down."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def _file_rows(source: FileSource, key: str) -> list[Row]:
    paths = [source.path] if isinstance(source.path, str) else source.path
    return read_files([os.path.expanduser(path) for path in paths], source.limit, f"{key}.path")


def _hub_rows(source: HubSource, key: str) -> list[Row]:
    dataset = _open_saved(source, key) if _is_saved(source.path) else _open_hub(source, key)
    if source.limit is not None:
        dataset = dataset.select(range(min(source.limit, len(dataset))))
    rows: list[Row] = []
    dataset = dataset.with_format(None)
    for start in range(0, len(dataset), 1000):
        columns = dataset[start : start + 1000]
        count = len(next(iter(columns.values()), ()))
        rows += [{name: plain(values[i]) for name, values in columns.items()} for i in range(count)]
    if not rows:
        raise UserError(
            "data-empty", "there is no row in it", key=f"{key}.path", got=f"{source.path}, split {source.split}"
        )
    return rows


def _is_saved(path: str) -> bool:
    folder = Path(path).expanduser()
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _open_saved(source: HubSource, key: str) -> Any:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(Path(source.path).expanduser())
    except Exception as error:
        raise UserError("data-unreadable", f"not readable: {error}", key=f"{key}.path", got=source.path) from None
    if not isinstance(dataset, DatasetDict):
        return dataset
    if source.split not in dataset:
        raise _no_split(source, [str(split) for split in dataset], key)
    return dataset[source.split]


def _no_split(source: HubSource, splits: list[str], key: str) -> UserError:
    near = nearest(source.split, splits)
    hint = f"Did you mean `{near}`?" if near else None
    return UserError(
        "data-missing",
        "the dataset has no such split",
        key=f"{key}.split",
        got=source.split,
        want=", ".join(splits),
        hint=hint,
    )


def _open_hub(source: HubSource, key: str) -> Any:
    from datasets import get_dataset_split_names, load_dataset

    path = Path(source.path).expanduser()
    if source.path.startswith((".", "/", "~")) and not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        hint = f"Is it {path.parent / near}?" if near else None
        raise UserError("data-missing", "there is no such folder", key=f"{key}.path", got=source.path, hint=hint)
    name = str(path) if path.exists() else source.path
    try:
        return load_dataset(name, source.subset, split=source.split)
    except Exception as error:
        # The library raises a dozen kinds, of its own and of its transport; all of them are about this address.
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "split" in first.lower():
            try:
                splits = [str(s) for s in get_dataset_split_names(name, source.subset)]
            except Exception:
                splits = []
            if splits and source.split not in splits:
                raise _no_split(source, splits, key) from None
        hint = "Is the id right, the network there, and do you have access to it? Files are read with `type: file`."
        raise UserError(
            "data-missing", f"cannot be loaded: {first}", key=f"{key}.path", got=source.path, hint=hint
        ) from None


def _reasoning_gym_rows(source: ReasoningGymSource, key: str) -> list[Row]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if source.task not in DATASETS:
        near = nearest(source.task, DATASETS)
        hint = f"Did you mean `{near}`?" if near else None
        raise UserError("data-missing", "reasoning-gym has no such task", key=f"{key}.task", got=source.task, hint=hint)
    size = min(source.size, source.limit or source.size)
    config = DATASETS[source.task][1]
    known = set(getattr(config, "__dataclass_fields__", {}))
    for name in source.params:
        if name not in known - {"size", "seed"}:
            near = nearest(name, known)
            hint = f"Did you mean `{near}`?" if near else None
            want = ", ".join(sorted(known - {"size", "seed"}))
            raise UserError(
                "config-bad-value",
                f"`{source.task}` has no such parameter",
                key=f"{key}.params",
                got=name,
                want=want,
                hint=hint,
            )
    try:
        dataset = reasoning_gym.create_dataset(source.task, size=size, seed=source.seed, **source.params)
        entries = [dataset[i] for i in range(size)]
    except Exception as error:
        message = f"`{source.task}` refuses its parameters: {describe_failure(error)}"
        raise UserError("config-bad-value", message, key=f"{key}.params", got=source.params) from None
    # The task's verifier reads the entry as the task made it, so it is kept whole; some read the parameters too.
    own = {"reasoning_gym_params": dict(source.params)} if source.params else {}
    return [{source.prompt_column: e["question"], "answer": e["answer"], "reasoning_gym": e, **own} for e in entries]


def _python_rows(source: PythonSource, key: str) -> list[Row]:
    function = load_function(source.function, f"{key}.function")
    try:
        made = function(**source.params)
        items = list(islice(made, source.limit)) if isinstance(made, Iterable) else made
    except Exception as error:
        message = f"{source.function} raised {describe_failure(error)}"
        raise UserError("plugin-broken", message, key=f"{key}.function", got=source.params or None) from error
    if not isinstance(items, list) or isinstance(made, (str, Mapping)):
        got = type(made).__name__
        raise UserError(
            "data-unreadable",
            f"{source.function} must return or yield rows",
            key=f"{key}.function",
            got=got,
            want="dicts",
        )
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            got = type(item).__name__
            raise UserError(
                "data-unreadable", f"row {index} of {source.function} is no dict", key=f"{key}.function", got=got
            )
    if not items:
        raise UserError(
            "data-empty", f"{source.function} gave no rows", key=f"{key}.function", got=source.params or None
        )
    return [plain(item) for item in items]


_READERS: dict[type[Any], Callable[[Any, str], list[Row]]] = {
    FileSource: _file_rows,
    HubSource: _hub_rows,
    ReasoningGymSource: _reasoning_gym_rows,
    PythonSource: _python_rows,
}


def _stem(path: str) -> str:
    """Return the file's name without its endings; of a glob, the part without wildcards, or else its folder's name."""
    folder, _, name = path.rstrip("/").rpartition("/")
    stem = re.sub(r"[*?\[\]]", "", name.partition(".")[0] or name).strip("-_.")
    return stem or (_stem(folder) if folder else "rows")


_NAMES: dict[type[Any], Callable[[Any], str]] = {
    FileSource: lambda s: _stem(s.path if isinstance(s.path, str) else s.path[0] if s.path else "file"),
    HubSource: lambda s: _stem(s.path),
    ReasoningGymSource: lambda s: s.task,
    PythonSource: lambda s: s.function.rpartition(":")[2],
}
