"""Landlock: what a program may open and connect to, where there are no namespaces. Three system calls.

It confines paths, TCP and (from ABI 6) signals and abstract sockets. It does not hide processes, does not confine UDP and
gives no private loopback; the backend that offers it must say so.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct

from rollyard.sandbox.local.inner import syscalls

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_PATH, _PORT = 1, 2
_EXECUTE, _WRITE, _READ, _READ_DIR, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_FILE = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_CONNECT = 1 << 1
_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """The kernel's version of it; 0 when it has none."""
    return max(0, _libc.syscall(ctypes.c_long(_CREATE), None, ctypes.c_long(0), ctypes.c_long(1)))


def ruleset(read: list[str], write: list[str], ports: list[int] | None) -> int:
    """A descriptor for rules that allow reading and running below `read`, everything below `write`, and TCP connections to
    `ports`, or to any where that is None. Paths that do not exist are left out."""
    version = abi()
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    attributes = struct.pack("=Q", every)
    if version >= 4:
        attributes += struct.pack("=Q", 0 if ports is None else _CONNECT)
    if version >= 6:
        attributes += struct.pack("=Q", 3)  # no signals and no abstract sockets to the outside
    created = _libc.syscall(ctypes.c_long(_CREATE), attributes, ctypes.c_long(len(attributes)), ctypes.c_long(0))
    fd = syscalls.check(created, "landlock")
    for path in read:
        _allow(fd, path, (_EXECUTE | _READ | _READ_DIR) & every)
    for path in write:
        _allow(fd, path, every)
    for port in ports or ():
        allow_port(fd, port)
    return fd


def allow_port(ruleset_fd: int, port: int) -> None:
    """For all that are put under these rules from now on. Before ABI 4 every port is open."""
    if abi() < 4:
        return
    rule = struct.pack("=QQ", _CONNECT, port)
    added = _libc.syscall(ctypes.c_long(_ADD), ctypes.c_long(ruleset_fd), ctypes.c_long(_PORT), rule, ctypes.c_long(0))
    syscalls.check(added, f"landlock port {port}")


def _allow(ruleset_fd: int, path: str, access: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            access &= _FILE
        rule = struct.pack("=Qi", access, parent)
        added = _libc.syscall(
            ctypes.c_long(_ADD), ctypes.c_long(ruleset_fd), ctypes.c_long(_PATH), rule, ctypes.c_long(0)
        )
        syscalls.check(added, f"landlock {path}")
    finally:
        os.close(parent)


def restrict(ruleset_fd: int) -> None:
    """This process and its children, for ever. Needs no_new_privs."""
    done = _libc.syscall(ctypes.c_long(_RESTRICT), ctypes.c_long(ruleset_fd), ctypes.c_long(0))
    syscalls.check(done, "landlock_restrict_self")
