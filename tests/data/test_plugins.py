"""Naming a user's function: what is found, and what is said when it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from surefoot.errors import UserError
from surefoot.plugins import load_function


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_function_of_a_file_and_of_a_module(tmp_path: Path):
    file = write(tmp_path / "mine.py", "def double(x):\n    return 2 * x\n")
    assert load_function(f"{file}:double", "k")(4) == 8
    assert load_function("os.path:join", "k")("a", "b") == "a/b"
    assert load_function("pathlib:Path.cwd", "k")() == Path.cwd()


def test_functions_of_one_file_share_its_state(tmp_path: Path):
    file = write(tmp_path / "state.py", "seen = []\ndef put(x): seen.append(x)\ndef get(): return seen\n")
    load_function(f"{file}:put", "k")(1)
    assert load_function(f"{file}:get", "k")() == [1]


def test_a_file_may_import_its_neighbour_but_not_shadow_the_standard_library(tmp_path: Path):
    write(tmp_path / "neighbour_of_mine.py", "VALUE = 7\n")
    write(tmp_path / "json.py", "raise RuntimeError('shadowed')\n")
    file = write(
        tmp_path / "mine.py",
        "import json\nfrom neighbour_of_mine import VALUE\ndef f(): return json.loads(str(VALUE))\n",
    )
    assert load_function(f"{file}:f", "k")() == 7


def test_relative_paths_start_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "local_plugin_file.py", "def f(): return 'here'\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("./local_plugin_file.py:f", "k")() == "here"
    assert load_function("local_plugin_file:f", "k")() == "here"


@pytest.mark.parametrize(
    ("spec", "code", "said"),
    [
        ("no_colon", "plugin-not-found", "package.module:function"),
        ("{dir}/mime.py:f", "plugin-not-found", "mine.py"),
        ("{dir}/mine.py:doubel", "plugin-not-found", "double"),
        ("{dir}/mine.py:NUMBER", "plugin-broken", "int"),
        ("{dir}/broken.py:f", "plugin-broken", "broken.py, line 2"),
        ("{dir}/syntax.py:f", "plugin-broken", "SyntaxError"),
        ("{dir}/needs.py:f", "plugin-broken", "no_such_module_at_all"),
        ("jsno:loads", "plugin-not-found", "json"),
        ("json.decodr:loads", "plugin-not-found", "json.decoder"),
    ],
)
def test_what_cannot_be_loaded_is_said_with_the_key_and_the_nearest_name(
    tmp_path: Path, spec: str, code: str, said: str
):
    write(tmp_path / "mine.py", "NUMBER = 3\ndef double(x):\n    return 2 * x\n")
    write(tmp_path / "broken.py", "import os\n1 / 0\n")
    write(tmp_path / "syntax.py", "def f(:\n")
    write(tmp_path / "needs.py", "import no_such_module_at_all\n")
    with pytest.raises(UserError) as caught:
        load_function(spec.format(dir=tmp_path), "data.sources.0.function")
    assert caught.value.code == code
    assert said in str(caught.value)
    assert "data.sources.0.function" in str(caught.value)


def test_a_module_that_failed_is_run_again_next_time(tmp_path: Path):
    file = tmp_path / "flaky.py"
    write(file, "1 / 0\n")
    with pytest.raises(UserError):
        load_function(f"{file}:f", "k")
    write(file, "def f():\n    return 'mended'\n")
    assert load_function(f"{file}:f", "k")() == "mended"
    assert not any(
        name.startswith("surefoot_user_flaky") and not hasattr(sys.modules[name], "f") for name in sys.modules
    )
