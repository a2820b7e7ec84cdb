"""Programs that models write: judged from outside, and unable to do anything but compute."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from surefoot.config.rewards import CodeReward
from surefoot.rewards.api import evaluate
from surefoot.rewards.code import build, read_tests, run_tests, sandbox_fault
from tests.rewards.helpers import item


def block(code: str) -> str:
    return f"Here you are:\n```python\n{code}\n```\nDone."


def outcome(response: str, answer: object, timeout_seconds: float = 10.0, **keys: object):
    spec = CodeReward.model_validate({"type": "code", **keys})
    (found,) = evaluate(build(spec, timeout_seconds), [item(response, answer)])
    return found


def passes(code: str, statement: str = "assert True", cpu_seconds: int = 2, memory_mb: int = 512, budget: float = 8.0):
    return run_tests(code, [{"assert": statement}], cpu_seconds, memory_mb, budget) == [True]


ADD = "a, b = map(int, input().split())\nprint(a + b)"
TESTS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]


def test_the_score_is_the_share_of_tests_passed():
    assert outcome(block(ADD), TESTS).value == 1.0
    assert outcome(block("print(3)"), TESTS).value == 0.5
    assert outcome(block("print(1/0)"), TESTS).value == 0.0
    assert outcome(block("def f(: no python"), TESTS).value == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        TESTS,
        json.dumps(TESTS),
        {"inputs": ["1 2", "5 5"], "outputs": ["3", "10"]},
        {"inputs": [["1 2"], ["5 5"]], "outputs": [["3"], ["10"]]},
        TESTS[0],
    ],
)
def test_layouts_of_tests_by_output(answer):
    assert outcome(block(ADD), answer).value == 1.0


def test_layouts_of_tests_by_statement():
    wanted = [{"assert": "assert f(1) == 2"}]
    for answer in (["assert f(1) == 2"], [{"assert": "f(1) == 2"}], "assert f(1) == 2", '["f(1) == 2"]'):
        assert [t["assert"].removeprefix("assert ") for t in read_tests(answer)] == ["f(1) == 2"]
    assert outcome(block("def f(x): return x + 1"), [*wanted, {"assert": "f(2) == 4"}]).value == 0.5


@pytest.mark.parametrize("answer", ["42", [], {}, [{"in": 1}], 7, {"fn_name": "f", "inputs": [1], "outputs": [2]}])
def test_an_answer_without_tests_is_an_error_of_its_row(answer):
    found = outcome(block(ADD), answer)
    assert found.value is None
    assert "ValueError" in str(found.error)


def test_the_last_closed_python_block_counts():
    assert outcome(block("print(0)") + block(ADD), TESTS).value == 1.0
    assert outcome(block(ADD) + "```\nprint(0)\n```\n```bash\nls\n```", TESTS).value == 1.0
    assert outcome(block(ADD) + "\n```python\nprint(0)", TESTS).value == 1.0
    assert outcome("```py\n" + ADD + "\n```", TESTS).value == 1.0
    assert outcome(ADD, TESTS).value == 0.0
    assert outcome(block(ADD), None).value is None


def test_programs_as_people_write_them_for_contests():
    tests = [{"input": "3\n1 2 3\n", "output": "6"}]
    programs = [
        "import sys\ndata = sys.stdin.buffer.read().split()\nprint(sum(map(int, data[1:])))\nsys.exit()",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\n"
        "def main():\n    input()\n    print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()",
        "import os, io, atexit\nout = io.StringIO()\natexit.register(lambda: os.write(1, out.getvalue().encode()))\n"
        "input()\nout.write(str(sum(map(int, input().split()))))",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "if __name__ == '__main__':\n    n = open(0).read().split()\n    print(P(sum(map(int, n[1:]))).x)\n    exit(0)",
        "import numpy as np\ninput()\nprint(np.array(input().split(), dtype=int).sum())",
    ]
    for program in programs:
        assert run_tests(program, tests, 5, 512, 20.0) == [True], program


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit()"])
def test_leaving_before_the_statement_does_not_pass_it(leave):
    assert not passes(leave)
    assert passes("x = 1")


def test_an_endless_loop_is_stopped_and_fails_only_its_test():
    started = time.monotonic()
    code = "x = int(input())\nwhile x: pass\nprint(x)"
    found = outcome(block(code), [{"input": "1", "output": "1"}, {"input": "0", "output": "0"}], cpu_seconds=1)
    assert found.value == 0.5
    assert time.monotonic() - started < 8


def test_sleeping_does_not_outlast_the_rows_time():
    started = time.monotonic()
    found = outcome(block("import time; time.sleep(60)"), TESTS, timeout_seconds=2.0)
    assert (found.value, found.error) == (0.0, None)
    assert time.monotonic() - started < 5


def test_memory_is_bounded():
    assert not passes("x = bytearray(1 << 30)", memory_mb=256)
    assert not passes("x = []\nwhile True: x.append(bytearray(1 << 20))", memory_mb=256)
    assert passes("x = bytearray(1 << 24)", memory_mb=256)


def test_processes_cannot_be_started():
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    refused = "try:\n    {}\nexcept PermissionError:\n    pass\nelse:\n    raise SystemExit(1)"
    for attempt in (
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/true', ['true'])",
    ):
        assert passes(refused.format(attempt)), attempt
    assert not passes("import os\nwhile True: os.fork()")
    threads = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    assert not passes(threads, memory_mb=256)
    assert {p.pid for p in psutil.Process().children(recursive=True)} == before


def test_the_network_is_out_of_reach():
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    call = f"import socket\nsocket.create_connection(('127.0.0.1', {server.server_port}), 2)"
    exec(call)  # From here it is reached.
    assert not passes(call)
    for family in ("AF_INET", "AF_INET6", "AF_UNIX"):
        code = f"import socket\ntry:\n    socket.socket(socket.{family})\nexcept PermissionError:\n    answer = 1"
        assert passes(code, "assert answer == 1"), family
    assert not passes("import socket; socket.socketpair()")
    server.shutdown()


def test_files_are_read_and_never_written(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    attempts = [
        f"open({str(victim)!r}, 'w')", f"open({str(victim)!r}, 'a')", f"open({str(victim)!r}, 'r+')",
        f"open({str(tmp_path / 'new')!r}, 'w')", f"os.unlink({str(victim)!r})", f"shutil.rmtree({str(tmp_path)!r})",
        f"os.truncate({str(victim)!r}, 0)", f"os.rename({str(victim)!r}, '/tmp/elsewhere')", "os.mkdir('/tmp/new')",
        f"os.chmod({str(victim)!r}, 0)", f"os.symlink('/', {str(tmp_path / 'link')!r})", f"os.utime({str(victim)!r})",
    ]  # fmt: skip
    for attempt in attempts:
        assert not passes(f"import os, shutil\n{attempt}"), attempt
    assert passes(f"assert open({str(victim)!r}).read() == 'precious'")
    assert os.listdir(tmp_path) == ["victim"]
    assert victim.read_text() == "precious"


def test_a_flood_of_output_is_cut_off():
    started = time.monotonic()
    assert run_tests("while True: print('x' * 10000)", [{"input": "", "output": "x"}], 2, 512, 8.0) == [False]
    assert time.monotonic() - started < 8
    wanted = "x" * (3 << 20)  # A test that asks for more may have it.
    assert run_tests("print('x' * (3 << 20))", [{"input": "", "output": wanted}], 5, 512, 20.0) == [True]


@pytest.mark.parametrize("attempt", [
    "os.kill(os.getppid(), 9)",
    "os.kill(-1, 9)",
    "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "open(f'/proc/{os.getppid()}/environ').read()",
    "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "os.setsid()",
    "os.write(4, b'1')",
    "os.memfd_create('more')",
])  # fmt: skip
def test_the_judge_and_the_limits_are_out_of_reach(attempt):
    assert not passes(f"import os, resource\n{attempt}")
    assert passes("import os, resource\nos.kill(os.getpid(), 0)")


def test_expected_outputs_are_nowhere_in_the_programs_process():
    search = """
import gc, sys
frame = sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *gc.get_objects()]:
        held = list(value.values()) if isinstance(value, dict) else value
        for text in held if isinstance(held, (list, tuple)) else [held]:
            if isinstance(text, str) and text.startswith("wanted-") and len(text) > 7:
                print(text)
                sys.exit()
    frame = frame.f_back
"""
    tests = [{"input": "", "output": f"wanted-{i}"} for i in range(2)]
    assert run_tests(search, tests, 5, 512, 20.0) == [False, False]
    planted = "where = ['wanted' + '-0']\n" + search  # The search finds what is there.
    assert run_tests(planted, tests, 5, 512, 20.0) == [True, False]


def test_each_test_starts_afresh():
    code = "import builtins\nseen = getattr(builtins, 'seen', 0) + 1\nbuiltins.seen = seen"
    assert run_tests(code, [{"assert": "assert seen == 1"}] * 3, 2, 512, 10.0) == [True] * 3


def test_the_sandbox_says_that_it_works_here():
    assert sandbox_fault() is None


def test_a_machine_without_filters_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "x86_64" in str(sandbox_fault())
