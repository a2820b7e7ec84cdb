"""Waiting for many processes at once: the first failure ends the wait, and says whose it was.

When one process of a group fails, the others may wait for it in a collective for ever; so nobody waits for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from ..errors import RunError, SurefootError

T = TypeVar("T")
LAST_LINES = 15


def gather(calls: Mapping[str, Any], logs: Path | None = None, check: Callable[[], None] = lambda: None) -> list[Any]:
    """Wait for calls to processes, by the processes' names; results in the same order.

    Args:
        calls: Ray's object references.
        logs: Folder with a log a process, `NAME.log`.
        check: Called every second; what it raises ends the wait.

    Raises:
        SurefootError: A process raised it; its message names the process.
        RunError: `worker-failed`: a process raised anything else. `worker-died`: it is gone.
    """
    names = {reference: name for name, reference in calls.items()}
    waiting = list(names)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, fetch_local=True, timeout=1.0)
        check()
        for reference in done:
            try:
                ray.get(reference)
            except RayError as error:
                raise _explain(names[reference], error, logs) from None
    return [ray.get(reference) for reference in calls.values()]


def poll(calls: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the answers that come within so many seconds, by name; who fails or does not answer is left out."""
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=seconds) if calls else ([], [])
    answers: dict[str, Any] = {}
    for name, reference in calls.items():
        if reference in ready:
            with contextlib.suppress(RayError):
                answers[name] = ray.get(reference)
    return answers


async def ask(name: str, call: Awaitable[T], logs: Path | None = None) -> T:
    """Wait for one call to a process within the event loop; raises what `gather` raises."""
    try:
        return await call
    except RayError as error:
        raise _explain(name, error, logs) from None


async def ask_all(calls: Mapping[str, Awaitable[Any]], logs: Path | None = None) -> list[Any]:
    """As `gather`, within the event loop."""
    tasks = [asyncio.ensure_future(ask(name, call, logs)) for name, call in calls.items()]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _explain(name: str, error: RayError, logs: Path | None) -> SurefootError:
    if isinstance(error, RayTaskError):
        cause: Any = error.cause
        if isinstance(cause, SurefootError):
            return type(cause)(cause.code, f"{cause.message} (in {name})", cause.key, cause.got, cause.want, cause.hint)
        what = f"{name} failed: {type(cause).__name__}: {_first_line(cause)}"
        return RunError("worker-failed", what, hint=_tail(name, logs))
    if isinstance(error, RayActorError):
        return RunError("worker-died", f"{name} is gone: {_first_line(error)}", hint=_tail(name, logs))
    return RunError("worker-failed", f"{name}: {type(error).__name__}: {_first_line(error)}", hint=_tail(name, logs))


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _tail(name: str, logs: Path | None) -> str | None:
    """The last lines of a process' log, where this host can see it."""
    if logs is None or not (file := logs / f"{name}.log").is_file():
        return None
    lines = file.read_text("utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return f"The last lines of {file}:\n" + "\n".join(f"    {line}" for line in lines)
