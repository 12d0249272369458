"""System calls that Python does not have, through ctypes. Each raises OSError with the path it was about.

Numbers above 423 are the same on every architecture; the few older ones are in `NUMBERS`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct
from typing import Any

MACHINE = platform.machine()
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {"clone": 56, "pivot_root": 155, "finit_module": 313},
    "aarch64": {"clone": 220, "pivot_root": 41, "finit_module": 273},
}
OPEN_TREE, MOVE_MOUNT, OPENAT2, MOUNT_SETATTR, CLOSE_RANGE = 428, 429, 437, 442, 436

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_PARENT = 0x00008000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x00000080

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    8192,
    16384,
    1 << 18,
)
MNT_DETACH = 2
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE, MOVE_MOUNT_F_EMPTY_PATH = -100, 0x1000, 0x8000, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_IDMAP = 0x1, 0x2, 0x4, 0x100000
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = 0x02, 0x04, 0x08, 0x10

IPC_RMID = 0
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 15, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
# chown dac_override fowner fsetid kill setgid setuid net_bind_service sys_chroot setfcap
KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18, 31})
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock, as a fork must


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def _call(number: int, *args: Any, what: str) -> int:
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return check(_libc.syscall(ctypes.c_long(number), *longs), what)


def clone(flags: int) -> int:
    """`os.fork` into new namespaces: 0 in the child. One process instead of unshare and a second fork."""
    python = ctypes.pythonapi
    for name in ("PyOS_BeforeFork", "PyOS_AfterFork_Child", "PyOS_AfterFork_Parent"):
        getattr(python, name).restype = None
    python.PyOS_BeforeFork()
    zero = ctypes.c_long(0)
    number = ctypes.c_long(NUMBERS[MACHINE]["clone"])
    pid = _held.syscall(number, ctypes.c_long(flags | signal.SIGCHLD), zero, zero, zero, zero)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error), "clone")
    return pid


def unshare(flags: int) -> None:
    check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int) -> None:
    check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(0)), "setns")


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        os.fsencode(options) if options else None,
    )
    check(result, f"mount {kind or 'bind'} at {target}")


def umount(target: str, flags: int = MNT_DETACH) -> None:
    check(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _call(NUMBERS[MACHINE]["pivot_root"], os.fsencode(new), os.fsencode(old), what="pivot_root")


def set_file_ids(uid: int, gid: int) -> None:
    """Whose rights this process has on files, and who owns what it makes; all other rights stay. For one thread."""
    _libc.setfsgid(ctypes.c_uint(gid))
    _libc.setfsuid(ctypes.c_uint(uid))
    if _libc.setfsuid(ctypes.c_uint(0xFFFFFFFF)) != uid:
        raise PermissionError(errno.EPERM, "the file ids cannot be set")


def remove_ipc(kind: str, number: int) -> None:
    """A System V segment (`shm`), semaphore set (`sem`) or queue (`msg`); one that is gone is fine."""
    if kind == "sem":
        _libc.semctl(ctypes.c_int(number), ctypes.c_int(0), ctypes.c_int(IPC_RMID), ctypes.c_int(0))
    else:
        control = _libc.shmctl if kind == "shm" else _libc.msgctl
        control(ctypes.c_int(number), ctypes.c_int(IPC_RMID), None)


def sethostname(name: str) -> None:
    raw = name.encode()
    check(_libc.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def load_module(path: str) -> None:
    """A module of the kernel; one that is there already is fine."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call(NUMBERS[MACHINE]["finit_module"], fd, b"", 0, what=path)
    except FileExistsError:
        pass
    finally:
        os.close(fd)


def prctl(option: int, value: int | ctypes.Array[ctypes.c_char] = 0, pointer: Any = None) -> int:
    second = ctypes.c_ulong(value) if isinstance(value, int) else value
    zero = ctypes.c_ulong(0)
    return check(_libc.prctl(ctypes.c_int(option), second, pointer or zero, zero, zero), f"prctl {option}")


def open_tree(path: str, *, recursive: bool = False) -> int:
    """A detached copy of the mount at `path`, as a descriptor."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    return _call(OPEN_TREE, AT_FDCWD, os.fsencode(path), flags, what=f"open_tree {path}")


def move_mount(fd: int, target: str) -> None:
    _call(MOVE_MOUNT, fd, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH, what=f"move_mount to {target}")


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def mount_setattr(fd: int, attributes: int, userns: int = 0) -> None:
    """For the mount and those that came with it."""
    value, flags = _MountAttr(attributes, 0, 0, userns), AT_EMPTY_PATH | AT_RECURSIVE
    _call(MOUNT_SETATTR, fd, b"", flags, ctypes.byref(value), ctypes.sizeof(value), what="mount_setattr")


class _OpenHow(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


def openat2(path: str, flags: int, mode: int = 0, *, resolve: int, at: int = AT_FDCWD) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    return _call(OPENAT2, at, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how), what=path)


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor above 2 that is not in `keep`."""
    start = 3
    for fd in [*sorted(fd for fd in keep if fd > 2), None]:
        last = 2**31 - 1 if fd is None else fd - 1
        if start <= last:
            _call(CLOSE_RANGE, start, last, 0, what="close_range")
        start = (fd or 0) + 1


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def set_capabilities(keep: frozenset[int], last: int) -> None:
    """Drop all but `keep`, from the bounding set too, so that no program started later can have them."""
    for number in range(last + 1):
        if number not in keep:
            prctl(PR_CAPBSET_DROP, number)
    mask = sum(1 << number for number in keep)
    words = (ctypes.c_uint32 * 6)(mask & 0xFFFFFFFF, mask & 0xFFFFFFFF, 0, mask >> 32, mask >> 32, 0)
    header = _CapHeader(0x20080522, 0)
    check(_libc.capset(ctypes.byref(header), ctypes.byref(words)), "capset")


def hide_arguments(name: str) -> None:
    """Overwrite this process's argv and environment in place: `/proc/PID/cmdline` of every fork shows `name` alone."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(fields[i]) for i in (45, 46, 47, 48))
    for start, end in ((arg_start, arg_end), (env_start, env_end)):
        if 0 < start < end:
            ctypes.memset(start, 0, end - start)
    raw = name.encode()[: max(0, arg_end - arg_start - 1)]
    ctypes.memmove(arg_start, raw, len(raw))
    prctl(PR_SET_NAME, ctypes.create_string_buffer(raw[:15]))
