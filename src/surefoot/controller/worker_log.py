"""A worker's output goes to a file of its own in the run folder."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path


def redirect_output(file: Path) -> None:
    """Let this process, and what it starts, write to a file: everything, also what C code prints."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
    faulthandler.enable()
