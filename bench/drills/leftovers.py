"""What a drill asks the machine: what sandboxes left behind, and whether processes waited for a processor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from rollyard.sandbox import backend as open_backend
from rollyard.sandbox.local import cgroups


class Starvation:
    """How long processes waited for a processor: on a busy machine a run may make no progress for that reason alone."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def describe(self, pids: Iterable[int]) -> str:
        """Seconds of CPU that they had and seconds that they waited for it, all together, since each began."""
        had = waited = 0.0
        for pid in pids:
            with contextlib.suppress(OSError, ValueError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    on, line, _ = map(int, (thread / "schedstat").read_text().split())
                    had, waited = had + on / 1e9, waited + line / 1e9
        return f"workers had {had:.0f} s of CPU and waited {waited:.0f} s for it, in {time.monotonic() - self._began:.0f} s"


def find_zygotes(home: str) -> list[int]:
    """The processes that make the sandboxes of a home: they write to its log."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "fd/2") == f"{home}/launcher.log":
                found.append(int(entry.name))
    return found


def sandbox_pids(home: str) -> set[int]:
    """With everything in the control groups that they made, which are named after them."""
    makers = find_zygotes(home)
    found, names = set(makers), tuple(f"/rollyard/{pid}-" for pid in makers)
    for entry in Path("/proc").iterdir() if makers else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and any(name in (entry / "cgroup").read_text() for name in names):
                found.add(int(entry.name))
    return found


class Leftovers:
    """What is on this machine that its owner should have removed. Others on the machine may leave groups too, and a group says no
    more than which process made it: so those that make the sandboxes of this home are remembered while it is watched."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.makers: set[int] = set()

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()

    async def wait_until_none(self, limit_s: float = 30.0) -> dict[str, int]:
        """Once the workers are gone; given a moment, since dying takes one."""
        end = time.monotonic() + limit_s
        while True:
            found = await self._count()
            if not any(found.values()) or time.monotonic() > end:
                return found
            await asyncio.sleep(0.5)

    async def _watch(self) -> None:
        while True:
            self.makers.update(await asyncio.to_thread(find_zygotes, self.home))
            await asyncio.sleep(1)

    async def _count(self) -> dict[str, int]:
        async with open_backend("local", root=self.home) as backend:  # which removes groups that are empty
            sandboxes = len(await backend.list())
        boxes = Path(self.home) / "boxes"
        mounts = sum(self.home in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
        groups = self._groups()
        return {
            "sandboxes": sandboxes + sum(1 for _ in boxes.iterdir()),
            "processes": len(sandbox_pids(self.home).union(*groups.values())),
            "mounts": mounts,
            "cgroups": len(groups),
        }

    def _groups(self) -> dict[Path, set[int]]:
        """Control groups whose maker is dead, which are named after its process id, and the processes that live in them."""
        dead = {str(pid) for pid in self.makers if not Path("/proc", str(pid)).exists()}
        groups = (path for h in cgroups.find().hierarchies for path in Path(h.root).glob("*-*"))
        found: dict[Path, set[int]] = {}
        for path in groups:
            with contextlib.suppress(OSError):
                if path.name.partition("-")[0] in dead:
                    found[path] = set(map(int, (path / "cgroup.procs").read_text().split()))
        return found
