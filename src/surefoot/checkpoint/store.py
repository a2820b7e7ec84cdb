"""Saving and loading checkpoints on a file system, so that at every instant some whole one can be loaded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import RunError
from ..tracking.environment import versions
from ..tracking.files import fsync_folder, naming_full_disk, share
from .layout import (
    CONFIG,
    MANIFEST,
    STATE,
    FileEntry,
    Found,
    Manifest,
    digest,
    folder_name,
    judge,
    newest,
    removable,
    unfinished_name,
)

if TYPE_CHECKING:
    import torch

_TRASH = ".trash-"

Component: TypeAlias = "Mapping[str, torch.Tensor] | Callable[[Path], None]"


def save(
    folder: Path,
    step: int,
    components: Mapping[str, Component],
    state: Mapping[str, Any],
    keep_last: int,
    config_yaml: str = "",
) -> Path:
    """Write the checkpoint of a step; older ones go only after it is whole and durable.

    It is written under a temporary name, each file synced, the manifest last, then renamed. Killed at any point, or
    with the disk full at any point, the newest older checkpoint is still whole.

    Args:
        folder: Where the run's checkpoints lie.
        step: Steps done.
        components: By name (`actor`, `actor_optimizer`, `critic`, `random`, ...): tensors by name, on any device, or
            a function that writes them to the path that it is given. Each becomes one safetensors file.
        state: What is not a tensor: plain data that JSON gives back unchanged (text keys, lists, numbers).
        keep_last: How many whole ones to keep; those with a file `KEEP` in them are not counted and stay.
        config_yaml: The resolved configuration: with it, the checkpoint can be exported wherever it lies.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: `disk-full`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final, temporary = folder / folder_name(step), folder / unfinished_name(step)
    _promote(folder)
    with naming_full_disk(temporary):
        try:
            _write(temporary, step, components, state, config_yaml)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    # Between these two moves the new one is whole under its temporary name, and `scan` knows it there.
    if final.exists():
        _discard(final)
    temporary.rename(final)
    fsync_folder(folder)
    for name in removable(scan(folder), keep_last):
        _discard(folder / name)
    for trash in folder.glob(f"{_TRASH}*"):
        shutil.rmtree(trash, ignore_errors=True)
    return final


def scan(folder: Path) -> list[Found]:
    """Judge every checkpoint folder in `folder`, in the order of their steps."""
    found: list[Found] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and (one := judge(path.name, _manifest_text(path), _sizes(path))) is not None:
            found.append(one)
    return sorted(found, key=lambda one: (one.step, one.name))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint whose digests were verified. Tensors are read when they are asked for."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]

    @property
    def components(self) -> list[str]:
        """Names of the tensor components."""
        return [name.removesuffix(".safetensors") for name in self.manifest.files if name.endswith(".safetensors")]

    def tensors(self, component: str) -> dict[str, torch.Tensor]:
        """Return a component's tensors by name, on the CPU, as they were saved bit for bit.

        Raises:
            RunError: `checkpoint-mismatch` when there is no such component.
        """
        from safetensors.torch import load_file

        return load_file(self.file(component))

    def shapes(self, component: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a component's tensors by name; nothing else is read.

        Raises:
            RunError: `checkpoint-mismatch` when there is no such component.
        """
        from safetensors import safe_open

        with safe_open(self.file(component), "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def file(self, component: str) -> Path:
        """Return the safetensors file of a component.

        Raises:
            RunError: `checkpoint-mismatch` when there is no such component.
        """
        if component not in self.components:
            raise RunError(
                "checkpoint-mismatch", f"{self.path} has no {component!r}", want=component, got=self.components
            )
        return self.path / f"{component}.safetensors"

    @property
    def config_yaml(self) -> str | None:
        """The configuration that it was made with; None when none was saved with it."""
        file = self.path / CONFIG
        return file.read_text("utf-8") if CONFIG in self.manifest.files else None


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, dict[str, str]]:
    """Open the newest checkpoint that is whole and undamaged.

    Returns:
        The checkpoint, and for each newer folder that is none, by name, what is wrong with it.
    """
    found = scan(folder)
    problems = {one.name: one.problem for one in found if one.problem is not None}
    while (best := newest([one for one in found if one.name not in problems])) is not None:
        try:
            return load(folder / best.name), problems
        except RunError as error:
            problems[best.name] = str(error.got)
    return None, problems


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it counts as none when old ones are deleted; people may look at it."""
    aside = path.with_name(f"damaged-{path.name.strip('.')}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def load(path: Path) -> Checkpoint:
    """Open a checkpoint, comparing the digest of every file with the manifest's, which reads all of them once.

    Raises:
        RunError: `checkpoint-corrupt` when it is not whole or a digest differs, naming the file.
    """
    text = _manifest_text(path)
    problem = f"there is no {MANIFEST}" if text is None else None
    if text is not None:
        try:
            manifest = Manifest.from_json(text)
            problem = _differs(path, manifest)
            if problem is None:
                return Checkpoint(path, manifest, json.loads((path / STATE).read_text("utf-8")))
        except ValueError as error:
            problem = str(error)
    hint = "checkpoint.resume=auto takes the newest one that is not damaged."
    raise RunError("checkpoint-corrupt", f"{path} can't be loaded", got=problem, hint=hint)


def _write(
    target: Path,
    step: int,
    components: Mapping[str, Component],
    state: Mapping[str, Any],
    config_yaml: str,
) -> None:
    from safetensors.torch import save_file

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name, component in components.items():
        path = target / f"{name}.safetensors"
        if callable(component):
            component(path)
        else:
            save_file(storable(component), path)
    (target / STATE).write_text(json.dumps(state), "utf-8")
    (target / CONFIG).write_text(config_yaml, "utf-8")
    names = [*(f"{name}.safetensors" for name in components), STATE, CONFIG]
    files = {name: _entry(target / name) for name in names}
    manifest = Manifest(step, files, versions(), digest(config_yaml.encode()))
    with (target / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(target)


def storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors contiguous, on the CPU, and with no memory shared, as safetensors wants them."""
    storable: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        start = plain.untyped_storage().data_ptr()
        if start in seen:
            plain = plain.clone()
        seen.add(start)
        storable[name] = plain
    return storable


def _entry(file: Path) -> FileEntry:
    """Sync a file to the disk; return its size and digest."""
    share(file)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        return FileEntry(file.stat().st_size, _file_digest(file))


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _differs(path: Path, manifest: Manifest) -> str | None:
    sizes = _sizes(path)
    for name, entry in manifest.files.items():
        if sizes.get(name) != entry.size:
            return f"{name} has {sizes.get(name, 'no')} bytes, not {entry.size}"
        if _file_digest(path / name) != entry.blake2b:
            return f"{name} is not what was written: its digest differs"
    return None


def _manifest_text(path: Path) -> str | None:
    file = path / MANIFEST
    return file.read_text("utf-8", errors="replace") if file.is_file() else None


def _sizes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}


def _promote(folder: Path) -> None:
    """Give whole checkpoints that were left under their temporary names their own."""
    for one in scan(folder):
        final = folder / folder_name(one.step)
        if one.problem is None and one.name == unfinished_name(one.step) and not final.exists():
            (folder / one.name).rename(final)


def _discard(path: Path) -> None:
    # Renamed first: a removal that is interrupted must not leave a folder that looks like a broken checkpoint.
    trash = path.with_name(f"{_TRASH}{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
