"""Take from a Linux process what judging text never needs: network, new processes, writing files, signals to others.

Two kinds of process lock themselves down for good: one that runs code written by the model (`sandbox.py`), and the
workers of the built-in verifiers, several of which hand model text to `eval` (sympy's parser does). A seccomp filter
needs no privilege and works inside containers that forbid namespaces; since a filtered process can neither fork nor
execute, there is nothing that could outlive it. Standard library only: the sandbox starts in 30 ms.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys

# name: (number on x86_64, number on aarch64); None where that machine has no such call.
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    # network
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # processes; threads stay allowed (see _clone)
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157),
    "setpgid": (109, 154), "unshare": (272, 97), "setns": (308, 268), "seccomp": (317, 277),
    # other processes; signals to oneself stay allowed
    "tkill": (200, 130), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    # files; opening for reading stays allowed (see _open)
    "creat": (85, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "mknod": (133, None), "mknodat": (259, 33),
    "truncate": (76, 45), "fallocate": (285, 47), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # memory that the address-space limit does not count
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # limits and priorities (see _prlimit, _prctl)
    "setrlimit": (160, 164), "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    # the machine
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "reboot": (169, 142), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "acct": (163, 89), "iopl": (172, None), "ioperm": (173, None), "syslog": (103, 116), "personality": (135, 92),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    # io_uring makes other calls on one's behalf, past the filter
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0),
    # identity
    "setuid": (105, 146), "setgid": (106, 144), "setresuid": (117, 147), "setresgid": (119, 149),
    "setreuid": (113, 145), "setregid": (114, 143), "setgroups": (116, 159), "capset": (126, 91),
}  # fmt: skip
_OPEN, _OPENAT, _OPENAT2 = (2, None), (257, 56), (437, 437)
_CLONE, _CLONE3, _PRLIMIT64, _PRCTL = (56, 220), (435, 435), (302, 261), (157, 167)
_KILL, _TGKILL, _SECCOMP = (62, 129), (234, 131), (317, 277)
_LAST_KNOWN = 451  # Newer calls answer "no such call": nothing that is not judged here gets through.

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # index above, AUDIT_ARCH
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x00010000

Instruction = tuple[int, int, int, int]


def can_lock_down() -> bool:
    """Whether this machine has the means: Linux on x86_64 or aarch64."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. `parent` is the starter's process id."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # It died before the call above.
            os._exit(1)


def hide_memory() -> None:
    """Keep other processes of the same user from reading or writing this one's memory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit(memory_bytes: int, cpu_seconds: int | None = None, file_bytes: int | None = None) -> None:
    """Bound this process's address space, processor time and the size of any file it writes; core dumps are off."""
    bounds = [(resource.RLIMIT_AS, memory_bytes, memory_bytes), (resource.RLIMIT_CORE, 0, 0)]
    if cpu_seconds is not None:
        bounds.append((resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1))
    if file_bytes is not None:
        bounds.append((resource.RLIMIT_FSIZE, file_bytes, file_bytes))
    for kind, soft, hard in bounds:
        _, ceiling = resource.getrlimit(kind)
        capped = [v if ceiling == resource.RLIM_INFINITY else min(v, ceiling) for v in (soft, hard)]
        resource.setrlimit(kind, (capped[0], capped[1]))


def lock_down() -> None:
    """Drop all capabilities and install the filter, for all threads of this process and for good.

    Forbidden calls fail with EPERM, calls unknown to this module with ENOSYS.

    Raises:
        OSError: The kernel refuses, or the machine is neither Linux on x86_64 nor on aarch64.
    """
    if not can_lock_down():
        raise OSError(errno.ENOSYS, f"no system call filter for {sys.platform} on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    index, _ = _MACHINES[platform.machine()]
    # Root without capabilities is an ordinary user; the header is version 3, the data two empty sets.
    libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))
    instructions = _filter(platform.machine(), os.getpid())
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    set_filter, all_threads = 1, 1
    failed = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    failed = failed or libc.syscall(_SECCOMP[index], set_filter, all_threads, header)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"the kernel refuses the system call filter: {os.strerror(code)}")


def _filter(machine: str, pid: int) -> list[Instruction]:
    """Return the BPF program. The accumulator holds the call's number wherever a rule starts."""
    index, architecture = _MACHINES[machine]
    no, unknown, yes = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS, _ALLOW
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, 0),
        (_JUMP_GREATER, 0, 1, _LAST_KNOWN),
        (_RETURN, 0, 0, unknown),
    ]

    def rule(call: tuple[int | None, int | None], *body: Instruction) -> None:
        number = call[index]
        if number is not None:
            program.extend([(_JUMP_EQUAL, 0, len(body), number), *body])

    def argument(position: int, half: int = 0) -> Instruction:
        return (_LOAD, 0, 0, 16 + 8 * position + 4 * half)

    def returns(verdict: int) -> Instruction:
        return (_RETURN, 0, 0, verdict)

    for call in _FORBIDDEN.values():
        rule(call, returns(no))
    for call in (
        _OPENAT2,
        _CLONE3,
    ):  # Their flags lie in memory, which a filter can't see; libc then takes the old call.
        rule(call, returns(unknown))
    for call, position in ((_OPEN, 1), (_OPENAT, 2)):
        rule(call, argument(position), (_JUMP_ANY_BIT, 0, 1, _WRITE_FLAGS), returns(no), returns(yes))
    rule(_CLONE, argument(0), (_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD), returns(no), returns(yes))
    for call in (_KILL, _TGKILL):
        rule(call, argument(0), (_JUMP_EQUAL, 1, 0, pid), returns(no), returns(yes))
    # Limits may be read (no new value given), not set.
    rule(
        _PRLIMIT64,
        argument(2),
        (_JUMP_EQUAL, 0, 2, 0),
        argument(2, 1),
        (_JUMP_EQUAL, 1, 0, 0),
        returns(no),
        returns(yes),
    )
    rule(_PRCTL, argument(0), (_JUMP_EQUAL, 0, 1, _PR_SET_PDEATHSIG), returns(no), returns(yes))
    return [*program, returns(yes)]
