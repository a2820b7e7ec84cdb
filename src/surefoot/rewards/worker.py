"""The process in which rewards that may hang, crash or leak are computed. It loads no torch of its own accord."""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil

from ..config.rewards import RewardSpec
from ..plugins import describe_failure
from .api import Outcome, RewardItem, evaluate
from .lockdown import can_lock_down, die_with_parent, limit, lock_down
from .table import build

VERIFIER_MEMORY = 4 << 30
"""Address space of a worker of the built-in verifiers, in bytes: text like `9**9**9` costs its row alone."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told first: the rewards it computes, by their place in the configuration."""

    specs: dict[int, RewardSpec]
    timeout_seconds: float
    locked: bool


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One call: `place` is the reward's place in the configuration."""

    place: int
    items: list[RewardItem]


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a task. `resident` is the process's memory after it, in bytes."""

    outcomes: list[Outcome]
    resident: int


def main(descriptor: int, parent: int) -> None:
    """Serve tasks from the socket at `descriptor` until it is closed.

    Protocol: a `Setup` comes in; None goes out when the rewards are built, or a text when that failed; then a `Reply`
    for each pickled `Task`.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    setup: Setup = connection.recv()
    try:
        functions = {place: build(spec, setup.timeout_seconds) for place, spec in setup.specs.items()}
        if setup.locked and can_lock_down():
            limit(VERIFIER_MEMORY)
            lock_down()
    except BaseException as error:
        connection.send(describe_failure(error))
        return
    connection.send(None)
    # Not getrusage: its peak begins with that of the process which started this one.
    memory = psutil.Process().memory_info
    with contextlib.suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            try:
                task: Task = pickle.loads(message)
                outcomes = evaluate(functions[task.place], task.items)
            except Exception as error:  # An item holds objects of a class that this process cannot import.
                outcomes = [Outcome(error=describe_failure(error))]
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(Reply(outcomes, memory().rss))
