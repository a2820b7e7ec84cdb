"""The system call filter, in processes that install it and then try what it forbids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from surefoot.rewards import lockdown

TRY = """
import errno, json, os, socket, sys, threading
from surefoot.rewards.lockdown import lock_down
if {user}: os.setgroups([]); os.setgid({user}); os.setuid({user})
lock_down()
found = {{}}
def attempt(name, call):
    try:
        call()
        found[name] = "done"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
def thread():
    other = threading.Thread(target=socket_in_thread); other.start(); other.join()
def socket_in_thread():
    attempt("socket in a thread", socket.socket)
attempt("socket", socket.socket)
attempt("fork", os.fork)
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("write", lambda: open("/tmp/new", "w"))
attempt("kill", lambda: os.kill(os.getppid(), 0))
attempt("setsid", os.setsid)
attempt("memfd", lambda: os.memfd_create("x"))
attempt("thread", thread)
attempt("read", lambda: open("/etc/passwd").read())
attempt("signal to itself", lambda: os.kill(os.getpid(), 0))
print(json.dumps(found))
"""

ALLOWED = {"read", "thread", "signal to itself"}


def tried(user: int = 0) -> dict[str, Any]:
    said = subprocess.run([sys.executable, "-c", TRY.format(user=user)], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)


@pytest.mark.parametrize("user", [0, 65534])
def test_what_is_forbidden_and_what_is_not(user):
    if user and os.getuid() != 0:
        pytest.skip("only root can become another user")
    found = tried(user)
    assert len(found) == 11
    assert found == {name: "done" if name in ALLOWED else "EPERM" for name in found}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_path_through_the_filter_ends(machine):
    program = lockdown._filter(machine, pid=1)
    assert len(program) < 4096
    for place, (code, jump_true, jump_false, _) in enumerate(program):
        if code & 0x07 == 0x05:  # A jump never leaves the program.
            assert max(place + 1 + jump_true, place + 1 + jump_false) < len(program)
    assert program[-1][0] == lockdown._RETURN


def simulate(machine: str, number: int, arguments: tuple[int, ...] = (), architecture: int | None = None) -> int:
    """Run the filter on one call as the kernel would."""
    values = {0: number, 4: lockdown._MACHINES[machine][1] if architecture is None else architecture}
    for place, argument in enumerate(arguments):
        values |= {16 + 8 * place: argument & 0xFFFFFFFF, 20 + 8 * place: argument >> 32}
    program, place, accumulator = lockdown._filter(machine, pid=77), 0, 0
    while True:
        code, jump_true, jump_false, operand = program[place]
        if code == lockdown._RETURN:
            return operand
        place += 1
        if code == lockdown._LOAD:
            accumulator = values.get(operand, 0)
        else:
            holds = {
                lockdown._JUMP_EQUAL: accumulator == operand,
                lockdown._JUMP_GREATER: accumulator > operand,
                lockdown._JUMP_ANY_BIT: bool(accumulator & operand),
            }[code]
            place += jump_true if holds else jump_false


NO, UNKNOWN, YES, KILLED = 0x00050001, 0x00050026, 0x7FFF0000, 0x80000000


@pytest.mark.parametrize(
    ("machine", "number", "arguments", "verdict"),
    [
        ("x86_64", 0, (), YES), ("x86_64", 1, (), YES),  # read, write
        ("x86_64", 41, (), NO), ("aarch64", 198, (), NO),  # socket
        ("aarch64", 41, (), NO), ("x86_64", 202, (), YES), ("aarch64", 98, (), YES),  # pivot_root, futex
        ("x86_64", 56, (0x11,), NO), ("x86_64", 56, (0x3D0F00,), YES),  # clone: a process, a thread
        ("aarch64", 220, (0x3D0F00,), YES), ("aarch64", 220, (0x11,), NO),
        ("x86_64", 2, (0, os.O_RDONLY), YES), ("x86_64", 2, (0, os.O_WRONLY), NO), ("x86_64", 2, (0, os.O_TRUNC), NO),
        ("aarch64", 56, (0, 0, os.O_CLOEXEC), YES), ("aarch64", 56, (0, 0, os.O_RDWR), NO),  # openat
        ("x86_64", 62, (77, 9), YES), ("x86_64", 62, (1, 9), NO), ("x86_64", 62, (2**64 - 1, 9), NO),  # kill
        ("x86_64", 302, (0, 7, 0), YES), ("x86_64", 302, (0, 7, 1 << 40), NO), ("x86_64", 302, (0, 7, 8), NO),
        ("x86_64", 157, (1, 0), NO), ("x86_64", 157, (15, 0), YES),  # prctl
        ("x86_64", 437, (), UNKNOWN), ("x86_64", 435, (), UNKNOWN), ("x86_64", 462, (), UNKNOWN),
        ("x86_64", 0x40000000 | 41, (), UNKNOWN),  # the x32 way to say socket
    ],
)  # fmt: skip
def test_the_filters_verdicts(machine, number, arguments, verdict):
    assert simulate(machine, number, arguments) == verdict


def test_calls_by_another_architecture_end_the_process():
    assert simulate("x86_64", 0, architecture=0x40000003) == KILLED


def test_a_child_started_by_a_parent_that_is_gone_leaves_at_once():
    code = "from surefoot.rewards.lockdown import die_with_parent; die_with_parent(1); print('still here')"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (1, "")
