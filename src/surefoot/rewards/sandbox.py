"""Run a program that a model wrote against test cases: one locked-down child per test, judged from outside of it.

`code.py` starts this as a small interpreter of its own: `main` reads one JSON job from standard input and writes one
line per test, `1` (passed) or `0`. Standard library only.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import secrets
import signal
import sys
import threading
import time
import types
from typing import Any

from surefoot.rewards.lockdown import die_with_parent, hide_memory, limit, lock_down

OUTPUT_BYTES = 1 << 20
"""Most that a program may print, or twice the expected output where that is more."""

_NONCE_PIPE = 3


def main(parent: int) -> None:
    """Serve one job: `{"code", "tests", "cpu_seconds", "memory_mb", "budget"}`; `budget` is seconds for all tests."""
    die_with_parent(parent)
    hide_memory()
    job = json.load(sys.stdin)
    deadline = time.monotonic() + job["budget"]
    print("ready", flush=True)
    for index in range(len(job["tests"])):
        print(int(run_test(job, index, deadline - time.monotonic())), flush=True)


def run_test(job: dict[str, Any], index: int, left: float) -> bool:
    """Whether the program passes one test. It is stopped after `left` seconds, or twice its processor time.

    `{"input", "output"}`: what it prints must equal `output`, white space apart. `{"assert"}`: the statement, run in
    the program's own interpreter after it, must hold; a program that leaves before it does not pass, whatever its
    exit code. (One that looks for this function's secret in the interpreter's frames could. Expected outputs are
    nowhere in its process.)
    """
    if left <= 0:
        return False
    test, nonce = job["tests"][index], secrets.token_bytes(16)
    given, printed, (told, tell) = os.memfd_create("in"), os.memfd_create("out"), os.pipe()
    try:
        os.write(given, test.get("input", "").encode())
        os.lseek(given, 0, os.SEEK_SET)
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _enter(job, index, (given, printed, tell), parent, nonce)
        os.close(tell)
        tell = -1
        if not _wait(child, min(left, 2.0 * job["cpu_seconds"])):
            return False
        return _content(printed).split() == test["output"].split() if "output" in test else os.read(told, 64) == nonce
    finally:
        for descriptor in (given, printed, told, tell):
            if descriptor >= 0:
                os.close(descriptor)


def _wait(child: int, seconds: float) -> bool:
    """Wait for the child, or kill it. Returns whether it left with exit code 0."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _enter(job: dict[str, Any], index: int, files: tuple[int, int, int], parent: int, nonce: bytes) -> None:
    """In the child: put everything away, lock the door, run the program, leave. Never returns."""
    try:
        given, printed, tell = files
        os.dup2(given, 0)
        os.dup2(printed, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        # The pipe goes to its place by way of a high number: what lies at 3 may be one of the others.
        os.dup2(os.dup2(tell, 200), _NONCE_PIPE)
        os.closerange(_NONCE_PIPE + 1, 4096)
        os.chdir("/")
        die_with_parent(parent)
        test = job["tests"][index]
        by_output = "output" in test
        source = job["code"] if by_output else f"{job['code']}\n{test['assert']}"
        file_bytes = max(OUTPUT_BYTES, 2 * len(test.get("output", "").encode()))
        limit(job["memory_mb"] << 20, job["cpu_seconds"], file_bytes)
        for told in job["tests"]:
            told.clear()
        lock_down()
        status = _execute(source, may_exit=by_output)
        if status == 0:
            os.write(_NONCE_PIPE, nonce)
        os._exit(status)
    finally:
        os._exit(70)


def _execute(source: str, may_exit: bool) -> int:
    """Run the program as a script would be, its threads and exit handlers included. Returns its exit code."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), encoding="utf-8")
    sys.stdout = own_output = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "w")), encoding="utf-8")
    sys.argv = ["solution.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        try:
            exec(compile(source, "solution.py", "exec"), vars(module))
        except SystemExit as leaving:
            if not may_exit or leaving.code not in (None, 0):
                return 1
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        for output in (sys.stdout, own_output):
            output.flush()
    except BaseException:
        return 1
    return 0


def _content(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read().decode("utf-8", "replace")
