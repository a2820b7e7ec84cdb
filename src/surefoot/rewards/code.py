"""Share of test cases that the program in the response passes. `sandbox.py` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ..config.rewards import CodeReward
from .api import RewardFunction, RewardItem
from .lockdown import can_lock_down

_BLOCK = re.compile(
    r"^[ \t]*```(?:python|py)3?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
_BOOT = "import sys; sys.path[:] = {path!r}; from surefoot.rewards.sandbox import main; main({parent})"

_ENVIRONMENT = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def build(spec: CodeReward, timeout_seconds: float) -> RewardFunction:
    """Return the function. It abstains on rows without an answer.

    No closed Python block scores 0, and so does each test that fails, is stopped by a limit, or is not reached before
    the row's time is over. Tests that cannot be read raise ValueError (the row's error).
    """
    budget = 0.8 * timeout_seconds

    def code(item: RewardItem) -> float | None:
        if item.answer is None:
            return None
        tests = read_tests(item.answer)
        blocks = _BLOCK.findall(item.response)
        if not blocks:
            return 0.0
        return sum(run_tests(blocks[-1], tests, spec.cpu_seconds, spec.memory_mb, budget)) / len(tests)

    return RewardFunction(code)


def read_tests(answer: Any) -> list[dict[str, str]]:
    """Return test cases as `{"input", "output"}` or `{"assert"}` from any of the accepted layouts.

    Raises:
        ValueError: The answer holds no tests, or one of another layout.
    """
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError:
            answer = [answer] if answer.lstrip().startswith("assert") else answer
    if isinstance(answer, Mapping) and "inputs" in answer and not answer.get("fn_name"):
        pairs = zip(answer["inputs"], answer["outputs"], strict=True)
        answer = [{"input": _joined(given), "output": _joined(wanted)} for given, wanted in pairs]
    if isinstance(answer, Mapping):
        answer = [answer]
    if not isinstance(answer, (list, tuple)) or not answer:
        raise ValueError(f"the answer holds no test cases: {str(answer)[:80]!r}")
    return [_read_test(test) for test in answer]


def _read_test(test: Any) -> dict[str, str]:
    if isinstance(test, str):
        return {"assert": test if test.lstrip().startswith("assert") else f"assert {test}"}
    if isinstance(test, Mapping) and "assert" in test:
        return _read_test(str(test["assert"]))
    if isinstance(test, Mapping) and "output" in test:
        return {"input": _joined(test.get("input") or ""), "output": _joined(test["output"])}
    raise ValueError(f"a test case needs `input` and `output`, or `assert`: {str(test)[:80]!r}")


def _joined(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, (list, tuple)) else str(text)


def run_tests(code: str, tests: list[dict[str, str]], cpu_seconds: int, memory_mb: int, budget: float) -> list[bool]:
    """Run a program against tests. `budget` is in seconds, for all of them.

    Raises:
        RuntimeError: The sandbox itself could not start.
    """
    job = {"code": code, "tests": tests, "cpu_seconds": cpu_seconds, "memory_mb": memory_mb, "budget": budget}
    boot = _BOOT.format(path=sys.path, parent=os.getpid())
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", boot],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT | {k: os.environ[k] for k in ("PATH", "LD_LIBRARY_PATH") if k in os.environ},
    )
    try:
        # The judge in there keeps the time; this limit is for the case that it cannot.
        said, _ = process.communicate(json.dumps(job).encode("utf-8", "replace"), timeout=budget + 5)
    except subprocess.TimeoutExpired:
        said = b""
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    lines = said.decode().split()
    if not lines:
        raise RuntimeError("the code sandbox did not start, or its machine had no time for it")
    passed = [line == "1" for line in lines[1:]]
    return passed + [False] * (len(tests) - len(passed))


def sandbox_fault() -> str | None:
    """Return why programs cannot be run safely here, or None: a program is run, and one that asks for a socket."""
    if not can_lock_down():
        return "it needs Linux on x86_64 or aarch64"
    tests = [{"assert": "assert answer == 42"}, {"assert": "import socket\nsocket.socket()"}]
    try:
        works, leaks = run_tests("answer = 42", tests, 5, 512, 20.0)
    except (RuntimeError, OSError) as error:
        return str(error)
    if leaks:
        return "a program could open a socket"
    return None if works else "a program cannot be run under the system call filter"
