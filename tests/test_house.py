"""The shape of the house: floors, sizes, error codes, keys that are read, what stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from surefoot.config.load import all_keys
from surefoot.errors import CODES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "surefoot"
FILES = sorted(SOURCE.rglob("*.py"))

FLOORS = {
    "records": 0, "errors": 0, "seeds": 0, "plugins": 0, "__init__": 0,
    "config": 1, "tracking": 1,
    "algorithms": 2, "data": 2, "rewards": 2,
    "train": 3, "rollout": 3, "sync": 3, "checkpoint": 3,
    "controller": 4,
    "cli": 5,
}  # fmt: skip


def place(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """First parts of the names below `surefoot` that a file imports, wherever in it."""
    depth = len(path.relative_to(SOURCE).parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level == depth:
                found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
            elif node.level == 0 and (node.module or "").startswith("surefoot."):
                found.add(node.module.split(".")[1])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path):
    mine = FLOORS[place(path)]
    higher = {name: FLOORS[name] for name in imports(path) if name in FLOORS and FLOORS[name] > mine}
    assert not higher


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path: Path):
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


def test_the_median_file_is_short():
    lengths = sorted(path.read_text().count("\n") for path in FILES if path.name != "__init__.py")
    assert lengths[len(lengths) // 2] <= 150


def strings_of(path: Path) -> set[str]:
    return {
        n.value
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


def test_every_code_is_used_and_every_used_code_explained():
    used = set().union(*(strings_of(path) for path in FILES if path.name != "errors.py"))
    assert set(CODES) - used == set()
    calls: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if name in ("UserError", "RunError", "Alarm") and node.args and isinstance(node.args[0], ast.Constant):
                calls[node.args[0].value].append(path.name)
    assert set(calls) - set(CODES) == set()


def test_every_key_is_read_somewhere():
    read: set[str] = set()
    for path in FILES:
        if place(path) != "config":
            read |= {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
            read |= strings_of(path)
    unread = {key for key, _, name in all_keys() if name not in read}
    assert unread == set()


def test_every_key_is_explained():
    undocumented = [
        f"{section.__name__}.{name}"
        for _, section, name in all_keys()
        if name != "type"
        and not section.model_fields[name].description
        and not section.model_fields[name].annotation.__doc__
    ]
    assert undocumented == []


@pytest.mark.parametrize("module", ["surefoot.config", "surefoot.cli", "surefoot.records", "surefoot.tracking.hub"])
def test_light_modules_load_without_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_loop_fits_a_screen():
    tree = ast.parse((SOURCE / "controller" / "loop.py").read_text())
    loop = next(n for n in tree.body if isinstance(n, ast.AsyncFunctionDef) and n.name == "step")
    assert loop.end_lineno - loop.lineno < 45


def test_no_path_or_host_of_a_machine_in_the_tree():
    pattern = re.compile(r"/(?:root|work|opt/wheels)/|(?:pypi|pythonhosted)\.org|download\.pytorch")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        path = ROOT / name
        if (
            path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ""}
            and path.is_file()
            and path != Path(__file__)
        ):
            assert not pattern.search(path.read_text(errors="ignore")), name
