"""Worker processes with a hard time limit: what spins in C code is killed, its row flagged, its place taken by another.

One thread a worker feeds it and watches the clock, so the pool works from any event loop and blocks none.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ..errors import RunError
from ..plugins import describe_failure
from .api import Outcome, RewardItem
from .worker import Reply, Setup, Task

_BOOT = "import sys; sys.path[:] = {path!r}; from surefoot.rewards.worker import main; main({descriptor}, {parent})"

START_SECONDS = 120.0
"""Longest that a worker may take to load its functions."""
TASKS_PER_WORKER = 5000
"""A worker is replaced after so many tasks, ..."""
GROWTH_BYTES = 1 << 30
"""... or when its resident memory has grown by so much since its first task: evaluators leak."""


class WorkerPool:
    """`size` worker processes that all hold the same functions."""

    def __init__(self, setup: Setup, size: int) -> None:
        self._setup = setup
        self._size = size
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._gate = threading.Lock()  # of the queue; held for an instant, since submit is called in event loops
        self._lock = threading.Lock()  # of the processes
        self._live: set[_Process] = set()
        self._closed = False
        self.replaced = 0  # workers killed for want of an answer, or found dead

    def start(self) -> None:
        """Start the workers and return at once; the first task waits until one is ready."""
        self._threads = [
            threading.Thread(target=self._serve, name="reward-worker", daemon=True) for _ in range(self._size)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, place: int, items: list[RewardItem]) -> Future[list[Outcome]]:
        """Have one call made. The future has an outcome per item; it raises RunError when workers cannot start."""
        future: Future[list[Outcome]] = Future()
        try:
            message = pickle.dumps(Task(place, items))
        except Exception as error:
            text = f"the row cannot be sent to a worker: {type(error).__name__}: {error}"
            future.set_result([Outcome(error=text)] * len(items))
            return future
        with self._gate:  # No job comes after the word to stop.
            if self._closed:
                future.set_exception(_unusable("closed"))
            else:
                self._jobs.put(_Job(message, len(items), future))
        return future

    def close(self) -> None:
        """Kill all workers and wait until they are gone. Calls that are under way or waiting raise RunError."""
        with self._gate:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        with self._lock:
            for process in self._live:
                process.kill()
        for thread in self._threads:
            thread.join(10)

    def _start_process(self) -> _Process:
        # Under the lock: close() kills what is in the set, so nothing may start that is not in it.
        with self._lock:
            if self._closed:
                raise _unusable("closed")
            process = _Process(self._setup)
            self._live.add(process)
            return process

    def _retire(self, process: _Process | None) -> None:
        # Under the lock too: once a process has been waited for, its id may belong to another.
        if process is not None:
            with self._lock:
                self._live.discard(process)
                process.kill()
                process.bury()

    def _serve(self) -> None:
        """One seat: a process, and a spare that is started as soon as a call looks as if it will not come back."""
        seat = _Seat()
        self._fill(seat)
        while (job := self._jobs.get()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(self._do(job, seat))
                # Whatever it was: a seat that ended would leave the rows after it waiting for ever.
                except Exception as error:
                    job.future.set_exception(
                        error if isinstance(error, RunError) else _unusable(describe_failure(error))
                    )
                self._fill(seat)
        self._retire(seat.current)
        self._retire(seat.spare)

    def _fill(self, seat: _Seat) -> None:
        with contextlib.suppress(OSError, RunError):  # The next task tries again, and is told.
            seat.current = seat.current or self._start_process()

    def _do(self, job: _Job, seat: _Seat) -> list[Outcome]:
        half = self._setup.timeout_seconds / 2
        process = seat.current = seat.current or self._start_process()
        keep = False
        try:
            process.wait_until_ready()
            process.send(job.message)
            if not process.answered(half):
                seat.spare = seat.spare or self._start_process()
            outcomes = process.result(half)
            keep = not process.worn_out
            return outcomes
        except _Lost as lost:
            if self._closed:
                raise _unusable("closed before this row was judged") from None
            self.replaced += 1
            return [Outcome(error=str(lost), seconds=lost.seconds / job.count)] * job.count
        finally:
            if not keep:
                self._retire(process)
                seat.current, seat.spare = seat.spare, None


@dataclass(slots=True, eq=False)
class _Job:
    message: bytes
    count: int
    future: Future[list[Outcome]]


@dataclass(slots=True, eq=False)
class _Seat:
    current: _Process | None = None
    spare: _Process | None = None


def _unusable(got: str) -> RunError:
    return RunError("reward-worker", "a worker process for rewards cannot be used", key="rewards", got=got)


class _Lost(Exception):
    """A call whose answer will not come: the worker is dead, or must be killed because time is up."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds


class _Process:
    """One worker process and the socket to it."""

    def __init__(self, setup: Setup) -> None:
        self._timeout = setup.timeout_seconds
        ours, theirs = Pipe(duplex=True)
        self._connection: Connection[Any, Any] = ours
        boot = _BOOT.format(path=sys.path, descriptor=theirs.fileno(), parent=os.getpid())
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # A session of its own: the whole of it can be killed, and Ctrl-C in the terminal is the controller's affair.
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", boot],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=dict(os.environ) | threads,
            start_new_session=True,
        )
        theirs.close()
        with contextlib.suppress(OSError):  # One that died at once is found out when its readiness is awaited.
            ours.send(setup)
        self._ready = False
        self._tasks = 0
        self._first_size = 0
        self._last_size = 0
        self._sent = 0.0

    @property
    def worn_out(self) -> bool:
        """Whether it should be replaced: it has done many tasks, or grown much."""
        return self._tasks >= TASKS_PER_WORKER or self._last_size - self._first_size > GROWTH_BYTES

    def wait_until_ready(self) -> None:
        """Wait until its functions are built.

        Raises:
            RunError: They cannot be.
        """
        if self._ready:
            return
        try:
            fault = (
                self._connection.recv() if self._connection.poll(START_SECONDS) else f"not ready in {START_SECONDS:g} s"
            )
        except (EOFError, OSError):
            fault = f"it {self._obituary()}"
        if fault is not None:
            raise _unusable(fault)
        self._ready = True

    def send(self, message: bytes) -> None:
        """Hand a task over."""
        self._sent = time.monotonic()
        with contextlib.suppress(OSError):  # Its death is noticed when the answer is read.
            self._connection.send_bytes(message)

    def answered(self, seconds: float) -> bool:
        """Wait for an answer, or for the process's death, at most so long."""
        return self._connection.poll(seconds)

    def result(self, seconds: float) -> list[Outcome]:
        """Return the answer, waiting at most so long.

        Raises:
            _Lost: There is none.
        """
        try:
            if not self._connection.poll(seconds):
                raise self._lost(f"no answer within {self._timeout:g} s; its worker was killed and replaced")
            reply: Reply = self._connection.recv()
        except (EOFError, OSError):
            raise self._lost(f"its worker {self._obituary()} and was replaced") from None
        self._tasks += 1
        self._first_size = self._first_size or reply.resident
        self._last_size = reply.resident
        return reply.outcomes

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def bury(self) -> None:
        """Wait until the killed process is gone."""
        self._process.wait()
        self._connection.close()

    def _lost(self, text: str) -> _Lost:
        return _Lost(text, time.monotonic() - self._sent)

    def _obituary(self) -> str:
        # Looked at without being waited for, so that its id stays its own until its whole group is killed.
        for _ in range(500):
            if end := os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                exited = end.si_code == os.CLD_EXITED
                return (
                    f"left with exit code {end.si_status}"
                    if exited
                    else f"died by {signal.Signals(end.si_status).name}"
                )
            time.sleep(0.01)
        return "closed its connection"
