"""What a run was made with: package versions and the state of the working directory's git repository."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("surefoot", "torch", "transformers", "peft", "datasets", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that decide what a run computes, importing none of them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_state(folder: Path) -> str | None:
    """Return the commit checked out around `folder`, with `(dirty)` when files differ from it; None without one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    # Untracked files are data and outputs more often than code.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} (dirty)" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
