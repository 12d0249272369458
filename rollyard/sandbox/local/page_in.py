"""Fetching memory back from the machine's swap before a program asks for it.

What a sandbox has in memory when it is put to sleep again, it used since it woke, and is likely to use after the next time too. A
program would fetch it page by page, one fault after the other. Here several threads read one byte of each page, which leaves
the pages where the program finds them: the work is the same, done by several cores and before the program goes on. Where no cores
are idle it would only make the program wait for more pages than it needs.

What was fetched and not used looks like what was used. So at each waking another eighth is left out: it comes back only if
the program asks for it, and what is used no more is forgotten.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from rollyard.sandbox.local.page_out import find_private

THREADS = 4
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PAGEMAP_SCAN = 0xC0606610  # Linux 6.7
# Size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, any_of, returned
_SCAN = struct.Struct("=12Q")
_REGIONS = 4096  # that one call tells: start, end, kinds
_PRESENT = 1 << 3
_MOST = 1024  # pages of one call
_LEFT_OUT, _BLOCK = 8, 16 * _PAGE  # one block in so many is left out

Regions = dict[int, list[tuple[int, int]]]  # of each process: from where to where


def find_resident(pids: Iterable[int], proc: Path) -> Regions:
    """What is in memory of all that could be paged out. Nothing where the kernel cannot tell."""
    found: Regions = {}
    for pid in pids:
        try:
            with (proc / str(pid) / "pagemap").open("rb", buffering=0) as pagemap:
                private = find_private(proc / str(pid) / "maps")
                found[pid] = [region for ends in private for region in _scan(pagemap.fileno(), *ends)]
        except OSError:  # it has ended, or the kernel is older
            found.pop(pid, None)
    return found


def _scan(pagemap: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    told = array("Q", bytes(8 * 3 * _REGIONS))
    where, _ = told.buffer_info()
    while start < end:
        asked = bytearray(_SCAN.pack(_SCAN.size, 0, start, end, 0, where, _REGIONS, 0, 0, _PRESENT, 0, _PRESENT))
        count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, asked)
        for region in range(count):
            yield told[3 * region], told[3 * region + 1]
        start = _SCAN.unpack(asked)[4]


def page_in(resident: Regions, waking: int, threads: int) -> None:
    """`waking` says which one it is. What cannot be read is left: a process that has ended, memory that was given back."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    with ThreadPoolExecutor(threads) as pool:
        for pid, regions in resident.items():
            pages = list(find_pages(regions, waking))
            share = -(-len(pages) // threads) or 1
            for first in range(0, len(pages), share):
                pool.submit(_touch, libc, pid, pages[first : first + share])


def find_pages(regions: Iterable[tuple[int, int]], waking: int) -> Iterator[int]:
    """Those to be fetched: all but another eighth at each waking."""
    for start, end in regions:
        for page in range(start, end, _PAGE):
            if (page // _BLOCK + waking) % _LEFT_OUT:
                yield page


def _touch(libc: ctypes.CDLL, pid: int, pages: list[int]) -> None:
    read = ctypes.create_string_buffer(_MOST)
    while pages:
        some = pages[:_MOST]
        there = array("Q", chain(*((page, 1) for page in some)))
        here = array("Q", (ctypes.addressof(read), len(some)))
        vectors = [ctypes.c_void_p(one.buffer_info()[0]) for one in (here, there)]
        done = libc.process_vm_readv(
            pid, vectors[0], ctypes.c_ulong(1), vectors[1], ctypes.c_ulong(len(some)), ctypes.c_ulong(0)
        )
        # it stops at a page that is gone
        pages = pages[len(some) if done == len(some) else max(done, 0) + 1 :]
