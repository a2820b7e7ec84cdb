"""Processes that must not outlive this one, even when it is killed without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

# It reads from a pipe that nobody writes to: the read ends when this process does, however that happens. A process is
# known by its number and its start: numbers are given again. It leaves its parent's children first, which Ray kills.
_SCRIPT = """
import os, signal, sys
if os.fork():
    os._exit(0)
sys.stdin.buffer.read()
for word in sys.argv[1:]:
    try:
        if word.startswith("/"):
            os.unlink(word)
            continue
        pid, start = word.split(":")
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[19] == start:
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""
_SHARED = "/dev/shm/"


class Reaper:
    """A small process that kills others when this one is gone, and removes the files in shared memory that they leave.

    Args:
        pids: Whom to kill.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        started = [f"{pid}:{_start_of(pid)}" for pid in pids]
        files = sorted({path for pid in [*pids, os.getpid()] for path in _shared_files(pid)})
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _SCRIPT, *started, *files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._process.wait()

    @classmethod
    def of_children(cls) -> Reaper:
        """Watch over every process that this one has started."""
        children = psutil.Process().children(recursive=True)
        # Python's resource tracker ends by itself, after it has removed what others left.
        return cls([child.pid for child in children if "multiprocessing.resource_tracker" not in str(child.cmdline())])

    def close(self) -> None:
        """Kill what is left of them now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()  # ends when the reaper does
        self._process.stdout.close()


def _start_of(pid: int) -> str:
    """When the process started, as the kernel counts (proc(5): the 22nd field of `stat`)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "gone"


def _shared_files(pid: int) -> list[str]:
    """Names in shared memory that a process has mapped; Ray's own are Ray's."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line[line.index(_SHARED) :] for line in lines if _SHARED in line}
    return [path for path in paths if not path.endswith("(deleted)") and "plasma" not in path]
