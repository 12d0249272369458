"""The system-call filter every program in a sandbox inherits: a hand-assembled BPF program, no library.

It refuses what a coding agent never needs and what reaches past the namespaces: socket families other than UNIX, IP and
netlink (AF_VSOCK is not confined by a network namespace), kernel attack surface (bpf, perf, io_uring, userfaultfd, keys,
modules), making new namespaces and mounts. It is not a sandbox by itself. Refusals are EPERM, except clone3, whose flags a
filter cannot see: ENOSYS makes every libc fall back to clone, whose flags it can.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Sequence

from rollyard.sandbox.local.inner import syscalls

_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _TRACE, _ERRNO = 0x7FFF0000, 0x7FF00000, 0x00050000
_NR, _ARCH, _ARG0 = 0, 4, 16
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

# name -> (x86_64, aarch64); None where the architecture has no such call
_ANY = (
    *((n, n) for n in (425, 426, 427)),  # io_uring
    *((n, n) for n in (428, 429, 430, 431, 432, 433, 442, 467)),  # the mount calls of 5.2 and later
    (443, 443),  # quotactl_fd
)
DENIED: dict[str, tuple[int | None, int | None]] = {
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "open_by_handle_at": (304, 265),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
}
_CLONE, _CLONE3, _UNSHARE, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (272, 97), (41, 198), (53, 199)
_SENDTO, _SENDMSG, _SENDMMSG, _MSG_FASTOPEN = (44, 206), (46, 211), (307, 269), 0x20000000
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)  # all that programs may open
_NAMESPACES = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value & 0xFFFFFFFF)


def program(machine: str, *, nesting: bool = False) -> bytes:
    """The filter's instructions for one architecture. `nesting` leaves namespaces and mounts to the program inside."""
    index = 0 if machine == "x86_64" else 1
    refuse = _op(_RET, _ERRNO | errno.EPERM)
    out = [_op(_LD, _ARCH), _op(_JEQ, AUDIT_ARCH[machine], 1, 0), refuse, _op(_LD, _NR)]
    if machine == "x86_64":
        out += [_op(_JGE, X32_BIT, 0, 1), refuse]
    spared = {"mount", "umount2", "pivot_root", "setns"} if nesting else set[str]()
    numbers = [pair[index] for name, pair in DENIED.items() if name not in spared]
    numbers += [pair[index] for pair in _ANY if not (nesting and pair[0] in range(428, 443))]
    for number in numbers:
        if number is not None:
            out += [_op(_JEQ, number, 0, 1), refuse]
    if not nesting:
        out += [_op(_JEQ, _CLONE3[index], 0, 1), _op(_RET, _ERRNO | errno.ENOSYS)]
        for pair in (_CLONE, _UNSHARE):
            out += [_op(_JEQ, pair[index], 0, 4), _op(_LD, _ARG0), _op(_JSET, _NAMESPACES, 0, 1), refuse]
            out += [_op(_RET, _ALLOW)]
    for pair in (_SOCKET, _SOCKETPAIR):
        out += [_op(_JEQ, pair[index], 0, 2 + 2 * len(_FAMILIES)), _op(_LD, _ARG0)]
        for family in _FAMILIES:
            out += [_op(_JEQ, family, 0, 1), _op(_RET, _ALLOW)]
        out += [refuse]
    return b"".join([*out, _op(_RET, _ALLOW)])


def tcp_program(machine: str) -> bytes:
    """For programs that share the host's network under Landlock, which knows TCP connections alone: no other sockets of the
    internet, and no data with the first packet, which makes a connection without asking for one."""
    index = 0 if machine == "x86_64" else 1
    refuse, allow = _op(_RET, _ERRNO | errno.EACCES), _op(_RET, _ALLOW)
    out = [_op(_LD, _NR)]
    for pair, argument in ((_SENDTO, 3), (_SENDMSG, 2), (_SENDMMSG, 3)):
        out += [_op(_JEQ, pair[index], 0, 4), _op(_LD, _ARG0 + 8 * argument), _op(_JSET, _MSG_FASTOPEN, 0, 1), refuse]
        out += [allow]
    out += [_op(_JEQ, _SOCKET[index], 1, 0), allow, _op(_LD, _ARG0)]
    out += [_op(_JEQ, socket.AF_INET, 2, 0), _op(_JEQ, socket.AF_INET6, 1, 0), allow]
    out += [_op(_LD, _ARG0 + 8), _op(_AND, 0xF), _op(_JEQ, socket.SOCK_STREAM, 1, 0), refuse, _op(_LD, _ARG0 + 16)]
    out += [_op(_JEQ, 0, 1, 0), _op(_JEQ, socket.IPPROTO_TCP, 0, 1), allow, refuse]
    return b"".join(out)


def trace_program(machine: str, numbers: Sequence[int], from_cwd: Sequence[int]) -> bytes:
    """Stops before each of the calls `numbers`, for the tracer of this process; and before those of `from_cwd` where their first
    argument is no directory but AT_FDCWD: a path beside a directory is below it, and walks over trees have many of them."""
    out = [_op(_LD, _ARCH), _op(_JEQ, AUDIT_ARCH[machine], 1, 0), _op(_RET, _ALLOW), _op(_LD, _NR)]
    for number in numbers:
        out += [_op(_JEQ, number, 0, 1), _op(_RET, _TRACE)]
    for number in from_cwd:
        out += [_op(_JEQ, number, 0, 4), _op(_LD, _ARG0), _op(_JEQ, syscalls.AT_FDCWD, 0, 1), _op(_RET, _TRACE)]
        out += [_op(_RET, _ALLOW)]
    return b"".join([*out, _op(_RET, _ALLOW)])


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install(code: bytes) -> None:
    """Needs no_new_privs. Inherited by every child and never removable."""
    value = _Program(len(code) // 8, code)
    syscalls.prctl(syscalls.PR_SET_SECCOMP, 2, ctypes.byref(value))
