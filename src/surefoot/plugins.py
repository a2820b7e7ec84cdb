"""A user's own function, named in the configuration: `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import UserError, nearest

_WANT = "package.module:function or path/to/file.py:function"


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """Return the function that `spec` names. `key` is the configuration key it stands at, for errors.

    A file is run once however often it is named, so its functions share their module's state. Its folder and the
    working directory can be imported from, after everything that is installed.

    Raises:
        UserError: `plugin-not-found` for a file, module or name that does not exist (with the nearest one that
            does); `plugin-broken` when the module raises while it is imported, or the name is nothing to call.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise UserError("plugin-not-found", "this does not name a function", key=key, got=spec, want=_WANT)
    _importable(Path.cwd())
    module = _load_file(Path(where).expanduser(), key) if _is_file(where) else _load_module(where, key)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = nearest(part, [n for n in dir(found) if not n.startswith("_")])
            hint = f"Did you mean `{where}:{near}`?" if near else None
            raise UserError("plugin-not-found", f"{where} has no `{name}`", key=key, got=spec, hint=hint)
        found = getattr(found, part)
    if not callable(found):
        raise UserError(
            "plugin-broken", f"`{name}` cannot be called", key=key, got=type(found).__name__, want="a function"
        )
    return found


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where or "\\" in where


def _importable(folder: Path) -> None:
    # At the end of the path: a user's `json.py` must not take the place of the standard one.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_file(path: Path, key: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        hint = f"Is it {path.parent / near}?" if near else None
        raise UserError("plugin-not-found", "there is no such file", key=key, got=path, hint=hint)
    name = f"surefoot_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    _importable(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError("plugin-not-found", "this is no Python file", key=key, got=path, want=_WANT)
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(str(path), key, error) from error
    return module


def _load_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself is missing, or something that it imports is: the second is a fault inside it.
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            hint = f"Did you mean `{near}`?" if (near := _nearest_module(error.name)) else None
            raise UserError(
                "plugin-not-found", f"there is no module `{error.name}`", key=key, got=name, hint=hint
            ) from None
        raise _broken(name, key, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(name, key, error) from error


def _nearest_module(name: str) -> str | None:
    parent, _, last = name.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    near = nearest(last, [m.name for m in pkgutil.iter_modules(folders)])
    return f"{parent}.{near}" if near and parent else near


def describe_failure(error: BaseException) -> str:
    """Return one line on an exception from a user's code: its type, its text, and the place it came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    # A syntax error names its place itself; its last frame is only this file's.
    frames = [] if isinstance(error, SyntaxError) else frames
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _broken(where: str, key: str, error: BaseException) -> UserError:
    return UserError("plugin-broken", f"{where} raises while it is imported", key=key, got=describe_failure(error))
