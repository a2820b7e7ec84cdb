"""Processes that must not outlive this one, even when it is killed without a word."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import psutil

# It reads from a pipe that nobody writes to: the read ends when this process does, however that happens.
_SCRIPT = """
import os, signal, sys
sys.stdin.buffer.read()
for pid in sys.argv[1:]:
    try:
        os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""


class Reaper:
    """A small process that kills others when this one is gone.

    Args:
        pids: Whom to kill.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _SCRIPT, *map(str, pids)], stdin=subprocess.PIPE, start_new_session=True
        )

    @classmethod
    def of_children(cls) -> Reaper:
        """Watch over every process that this one has started."""
        return cls([child.pid for child in psutil.Process().children(recursive=True)])

    def close(self) -> None:
        """Kill what is left of them now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
