"""Writing files so that a reader sees the old one or the new one, and a full disk has a name."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import RunError

# EFBIG is what a file-size limit (ulimit -f) gives: for the user it is the same trouble.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_disk_full(error: BaseException) -> bool:
    """Say whether an error means that there is no room for the file. Libraries that hide errno keep it in the text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    text = str(error)
    return any(f"os error {code})" in text or os.strerror(code) in text for code in _FULL)


def free_bytes(path: Path) -> int:
    """Return how many bytes this user may still write on the disk that holds `path`, which need not exist."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def human_bytes(count: float) -> str:
    """Return `count` bytes as people write them.

    Example:
        human_bytes(1536) == "1.5 KiB"
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Turn a full disk, met while writing `path`, into RunError `disk-full`. Other errors pass."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        free = human_bytes(free_bytes(path))
        raise RunError("disk-full", f"no room to write {path}", got=f"{free} free on its disk ({error})") from error


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace `path` by `data` in one move: after a crash the old content or the new is there, never a mixture.

    Raises:
        RunError: `disk-full`. The old content is still there.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    with naming_full_disk(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            share(Path(temporary))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def fsync_folder(folder: Path) -> None:
    """Make a folder's entries durable: a rename counts as done only after this."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def share(file: Path) -> None:
    """Give a file the permissions that an ordinary new file has. Temporary ones are private, other libraries' too."""
    # The only portable way to read the mask is to set it.
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)
