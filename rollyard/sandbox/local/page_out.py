"""Moving what processes hold in memory to the machine's swap: `process_madvise(MADV_PAGEOUT)`.

Only private memory goes: programs and libraries are files, which the kernel shares among all sandboxes and can drop by itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from rollyard.core.errors import Unsupported

_PROCESS_MADVISE = 440  # the same on every architecture
_MADV_PAGEOUT = 21
_MOST = 1024  # ranges of one call


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def page_out(pids: Iterable[int], proc: Path) -> None:
    """What cannot be paged out stays where it is: memory that is locked, a process that has ended. Where this user may do it to
    no process at all, it is an error."""
    libc = _load_libc()
    refusals: list[OSError] = []
    done = 0
    for pid in pids:
        try:
            ranges = list(find_private(proc / str(pid) / "maps"))
            pidfd = os.pidfd_open(pid)
            try:
                _advise(libc, pidfd, ranges)
            finally:
                os.close(pidfd)
            done += 1
        except PermissionError as error:
            refusals.append(error)
        except OSError:  # it has ended
            continue
    if refusals and not done:
        raise _refusal(refusals[0])


def check_right() -> None:
    """An error where this user may page out no other process: tried on one of its own, of which no memory is named."""
    with subprocess.Popen(["/bin/sh", "-c", "read _"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        pidfd = os.pidfd_open(other.pid)
        try:
            _ask_kernel(_load_libc(), pidfd, [])
        except PermissionError as error:
            raise _refusal(error) from None
        finally:
            os.close(pidfd)


def _refusal(error: OSError) -> Unsupported:
    return Unsupported(
        f"no memory of a sandbox can be paged out: {error.strerror}",
        hint="run as root, in a container with CAP_SYS_NICE, or let agents stay awake",
    )


def _advise(libc: ctypes.CDLL, pidfd: int, ranges: list[tuple[int, int]]) -> None:
    """The kernel stops at the first range that it refuses and says how far it came: the rest is asked for after it."""
    while ranges:
        some = ranges[:_MOST]
        done = _ask_kernel(libc, pidfd, some)
        whole = 0
        for start, end in some:
            if done < end - start:
                break
            done -= end - start
            whole += 1
        ranges = ranges[whole + (whole < len(some)) :]


def _ask_kernel(libc: ctypes.CDLL, pidfd: int, ranges: list[tuple[int, int]]) -> int:
    """How many bytes it went through; an error where it refuses whatever is named."""
    asked = (_Range * len(ranges))(*((start, end - start) for start, end in ranges))
    done = libc.syscall(_PROCESS_MADVISE, pidfd, asked, ctypes.c_size_t(len(ranges)), _MADV_PAGEOUT, 0)
    if done < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def find_private(maps: Path) -> Iterator[tuple[int, int]]:
    """Private ranges that may be written to: the heap, stacks, what was allocated, the data of libraries."""
    for line in maps.read_text().splitlines():
        where, mode, _, _, _, *name = line.split(maxsplit=5)
        if mode[1] == "w" and mode[3] == "p" and name[:1] not in (["[vvar]"], ["[vdso]"]):
            start, end = (int(number, 16) for number in where.split("-"))
            yield start, end
