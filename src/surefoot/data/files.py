"""Rows of parquet, jsonl, json and csv files, local or behind any fsspec URL, as plain Python dicts."""

from __future__ import annotations

import csv
import io
import json
import posixpath
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, BinaryIO

from ..errors import UserError, nearest

Row = dict[str, Any]

_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip"}


def read_files(paths: list[str], limit: int | None, key: str) -> list[Row]:
    """Return the rows of all files, in the order of `paths` (a glob's matches sorted), the first `limit` of them.

    Nothing is guessed about values: parquet gives its own types, json its own, csv gives text. A csv line that is
    too short has no entry for what is missing.

    Raises:
        UserError: `data-missing` for a file that does not exist, `data-unreadable` for one that is not what its
            name says, `data-empty` when there is no row in any.
    """
    rows: list[Row] = []
    for path in paths:
        filesystem, found = _expand(path, key)
        for name in found:
            reader = _READERS.get(_extension(name))
            if reader is None:
                want = ", ".join(_READERS)
                raise UserError(
                    "data-unreadable", f"{name} has no known file type", key=key, got=_extension(name), want=want
                )
            rest = None if limit is None else limit - len(rows)
            rows += islice(_guarded(filesystem, name, reader, key), rest)
    if not rows:
        raise UserError("data-empty", "there is no row in it", key=key, got=", ".join(paths))
    return rows


def _extension(name: str) -> str:
    stem, extension = posixpath.splitext(name.lower())
    return posixpath.splitext(stem)[1] if extension in _COMPRESSED else extension


def _expand(path: str, key: str) -> tuple[Any, list[str]]:
    """Return the file system and the files that a path or glob stands for."""
    import fsspec
    from fsspec.core import has_magic

    try:
        filesystem, name = fsspec.url_to_fs(path)
        if filesystem.isfile(name):
            return filesystem, [name]
        found = sorted(f for f in filesystem.glob(name) if filesystem.isfile(f)) if has_magic(name) else []
        if found:
            return filesystem, found
        is_folder = filesystem.isdir(name)
        parent = posixpath.dirname(name.rstrip("/"))
        siblings = (
            [posixpath.basename(f) for f in filesystem.ls(parent, detail=False)] if filesystem.isdir(parent) else []
        )
    except ImportError as error:
        raise UserError(
            "data-missing", f"a package for this kind of address is missing: {error}", key=key, got=path
        ) from None
    except ValueError as error:
        raise UserError("data-missing", f"not an address: {error}", key=key, got=path) from None
    except Exception as error:
        raise UserError(
            "data-missing", f"cannot be reached: {type(error).__name__}: {error}", key=key, got=path
        ) from None
    if is_folder:
        hint = f"Name its files, such as `{path.rstrip('/')}/*.parquet`, or read a saved dataset with `type: hub`."
        raise UserError("data-missing", "this is a folder, not a file", key=key, got=path, hint=hint)
    near = nearest(posixpath.basename(name), siblings)
    hint = f"Is it {posixpath.join(parent, near)}?" if near else None
    what = "no file matches" if has_magic(name) else "there is no such file"
    raise UserError("data-missing", what, key=key, got=path, hint=hint)


def _guarded(filesystem: Any, name: str, reader: Callable[[BinaryIO, str], Iterator[Row]], key: str) -> Iterator[Row]:
    """Read one file; whatever a parser says of it becomes an error that names the file."""
    import fsspec.utils

    compression = fsspec.utils.infer_compression(name)
    try:
        with filesystem.open(name, "rb", compression=compression) as file:
            yield from reader(file, name)
    except UserError as error:
        raise UserError(error.code, error.message, key=key, got=error.got, want=error.want, hint=error.hint) from None
    except (ValueError, OSError, EOFError, csv.Error) as error:
        # pyarrow's errors are ValueErrors and OSErrors; so are those of json, unicode and of broken archives.
        raise UserError("data-unreadable", f"not readable: {error}", key=key, got=name) from None


def _parquet(file: BinaryIO, name: str) -> Iterator[Row]:
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    decode = _json_columns(parquet.schema_arrow)
    for batch in parquet.iter_batches(batch_size=4096):
        rows = batch.to_pylist(maps_as_pydicts="lossy")
        yield from map(decode, rows) if decode else rows


def _json_columns(schema: Any) -> Callable[[Row], Row] | None:
    # The datasets library stores objects of mixed shape as JSON text and says so in the file's metadata only.
    if b'"Json"' not in (schema.metadata or {}).get(b"huggingface", b""):
        return None
    from datasets import Features

    return Features.from_arrow_schema(schema).decode_example


def _jsonl(file: BinaryIO, name: str) -> Iterator[Row]:
    for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8-sig"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                "data-unreadable", f"line {number} of {name} is no JSON: {error}", got=line[:80].rstrip()
            ) from None
        yield _mapping(row, f"line {number} of {name}")


def _json(file: BinaryIO, name: str) -> Iterator[Row]:
    text = file.read().decode("utf-8-sig")
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        # Many files named .json hold one object a line.
        yield from _jsonl(io.BytesIO(text.encode()), name)
        return
    if not isinstance(rows, list):
        keys = ", ".join(map(str, rows)) if isinstance(rows, dict) else None
        got = f"an object with the keys {keys}" if keys else type(rows).__name__
        raise UserError(
            "data-unreadable",
            f"{name} must hold a list of objects",
            got=got,
            hint="Or write one object a line (.jsonl).",
        )
    for number, row in enumerate(rows):
        yield _mapping(row, f"entry {number} of {name}")


def _csv(file: BinaryIO, name: str) -> Iterator[Row]:
    # The module's own limit of 128 KiB a cell is for the whole process; prompts may be longer.
    csv.field_size_limit(2**31 - 1)
    delimiter = "\t" if _extension(name) == ".tsv" else ","
    reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True)
    for row in reader:
        if None in row:
            message = f"line {reader.line_num} of {name} has more cells than the header"
            raise UserError(
                "data-unreadable", message, got=row[None], hint="Put cells with commas or line ends in double quotes."
            )
        yield {column: cell for column, cell in row.items() if cell is not None}


def _mapping(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(
            "data-unreadable", f"{where} is no object", got=type(row).__name__, want="columns and their values"
        )
    return row


_READERS: dict[str, Callable[[BinaryIO, str], Iterator[Row]]] = {
    ".parquet": _parquet,
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
}
