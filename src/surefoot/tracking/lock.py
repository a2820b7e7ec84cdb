"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from ..errors import UserError

_held: set[Path] = set()


class FolderLock:
    """Holds `folder/.lock` until `release` or the end of the process, however it ends.

    A record lock, since children that are forked do not inherit it: one that outlives the run can't keep the folder
    locked. Such locks don't tell two holders in one process apart, so these are counted here.

    Raises:
        UserError: `run-folder-locked`, with the process that holds it.
        OSError: The file system has no locks, or the folder can't be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._path = (folder / ".lock").resolve()
        if self._path in _held:
            raise _locked(folder, f"process {os.getpid()} (this one)")
        self._file: IO[str] = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                self._file.close()
                raise  # not a holder: a file system without locks, for one
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise _locked(folder, holder or "a process that did not say its name") from None
        _held.add(self._path)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        """Let others in. The file stays: removing it would let two runs lock two files of one name."""
        if not self._file.closed:
            _held.discard(self._path)
            self._file.close()


def _locked(folder: Path, holder: str) -> UserError:
    return UserError(
        "run-folder-locked",
        "another run is using this folder",
        key=str(folder),
        got=f"locked by {holder}",
        hint="Wait for it, stop it, or give this run another `name`.",
    )
