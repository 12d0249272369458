"""The memory of this machine and of each sandbox on it, as /proc tells them.

A sandbox's memory is the proportional set size of its processes: what many share, such as the programs of an agent's layer, is
counted once over all of them. Of a process that may not be read so closely it is what is resident, which is never less.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from rollyard.core.sandbox import MemoryUse
from rollyard.sandbox.local.page_in import THREADS, Regions, find_resident, page_in
from rollyard.sandbox.local.page_out import check_right, page_out

_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_CACHE = ("inactive_file", "total_inactive_file")


class ProcessMemory(NamedTuple):
    """`files` is the part of what it holds that are pages of files."""

    held: int = 0
    files: int = 0
    swapped: int = 0


class MachineMemory:
    """`proc` is where the machine's own numbers are, `groups` the control groups that all sandboxes are in."""

    def __init__(self, proc: str | Path = "/proc", groups: Iterable[str] = (), *, cores: int | None = None) -> None:
        self._proc = Path(proc)
        self._groups = tuple(Path(root) for root in groups)
        self._cores = cores or len(os.sched_getaffinity(0))
        self._may_page_out = False  # not known yet

    def read(self, sandboxes: Mapping[str, int]) -> MemoryUse:
        """`sandboxes` are the first processes of each, by the sandbox's id."""
        known = self._fields(self._proc / "meminfo")
        total, available = known.get("MemTotal", 0), known.get("MemAvailable", 0)
        for limit, used in filter(None, map(_read_limit, self._groups)):
            total, available = min(total, limit), min(available, max(0, limit - used))
        each = {name: self._measure(pid) for name, pid in sandboxes.items()}
        return MemoryUse(
            total=total,
            available=available,
            swap=known.get("SwapTotal", 0),
            swap_free=known.get("SwapFree", 0),
            sandboxes={name: one.held for name, one in each.items()},
            files={name: one.files for name, one in each.items()},
            swapped={name: one.swapped for name, one in each.items()},
        )

    def has_swap(self) -> bool:
        """Whether there is somewhere for memory to go: a swap file or partition, or zram."""
        with contextlib.suppress(OSError):
            return len((self._proc / "swaps").read_text().splitlines()) > 1
        return False

    def check_page_out(self) -> None:
        """An error where this user may page nothing out."""
        if not self._may_page_out:
            check_right()
        self._may_page_out = True

    def page_out(self, first: int) -> Regions:
        """All of a sandbox that is private to it; gives what of that was in memory."""
        pids = self.processes(first)
        resident = find_resident(pids, self._proc)
        page_out(pids, self._proc)
        return resident

    def page_in(self, used: Regions, waking: int) -> None:
        """Where at least two cores beside the program's own are idle: with fewer it fetches what it needs as fast itself."""
        if (idle := self.count_idle_cores()) > 1:
            page_in(used, waking, min(idle, THREADS))

    def count_idle_cores(self) -> int:
        """At this moment; who asks counts as busy, and stands for the program that goes on."""
        running = int((self._proc / "loadavg").read_text().split()[3].partition("/")[0])
        return max(0, self._cores - running)

    def processes(self, first: int) -> list[int]:
        """A process and all that it and its children started; a sandbox's orphans are its first process's."""
        found = [first]
        for pid in found:
            for task in self._list(self._proc / str(pid) / "task"):
                with contextlib.suppress(OSError):
                    found += map(int, (task / "children").read_text().split())
        return found

    def _measure(self, first: int) -> ProcessMemory:
        """Of a sandbox."""
        each = [self._measure_process(pid) for pid in self.processes(first)]
        return ProcessMemory(*map(sum, zip(*each, strict=True)))

    def _measure_process(self, pid: int) -> ProcessMemory:
        place = self._proc / str(pid)
        with contextlib.suppress(OSError, KeyError):
            known = self._fields(place / "smaps_rollup")
            return ProcessMemory(known["Pss"], known.get("Pss_File", 0), known.get("SwapPss", 0))
        with contextlib.suppress(OSError, IndexError, ValueError):
            return ProcessMemory(int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        return ProcessMemory()  # it ended meanwhile

    @staticmethod
    def _list(folder: Path) -> list[Path]:
        try:
            return list(folder.iterdir())
        except OSError:  # it ended
            return []

    @staticmethod
    def _fields(file: Path) -> dict[str, int]:
        """`Name:   123 kB` in bytes."""
        found: dict[str, int] = {}
        for line in file.read_text().splitlines():
            name, colon, rest = line.partition(":")
            if colon and rest.endswith(" kB"):
                found[name] = int(rest.split()[0]) * 1024
        return found


def _read_limit(group: Path) -> tuple[int, int] | None:
    """What a container lets all in it use, and what they do: files that nobody looks at are given up when memory is short."""
    for limit, used in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
            most, now = int((group / limit).read_text()), int((group / used).read_text())
            cache = 0
            for line in (group / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                cache = int(value) if name in _CACHE else cache
            return most, max(0, now - cache)
    return None
