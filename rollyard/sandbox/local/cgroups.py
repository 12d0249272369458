"""Limits on memory, processes and CPU: cgroup v2 where its controllers are, v1 where they are, both mixed, else rlimits.

Nothing is assumed from a version: a group is made and its files looked at. Groups go under `rollyard/` at the root of each
hierarchy; nobody else's group is touched.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rollyard.core.sandbox import Resources

Controller = Literal["memory", "pids", "cpu"]
CONTROLLERS: tuple[Controller, ...] = ("memory", "pids", "cpu")
DEFAULT_PIDS = 4096
MEMORY_SHARE = 0.5  # of the machine, for a sandbox that names no limit
# Of a processor that others want too. An idle one is there for all: a quota would make honest work slower.
CPU_SHARE: dict[int, dict[str, str]] = {1: {"cpu.shares": "512"}, 2: {"cpu.weight": "50"}}
# All sandboxes together, for each processor: as much as one process beside them. More would starve the runner that serves them.
_ALL_SHARE: dict[int, tuple[str, int, int]] = {1: ("cpu.shares", 1024, 262_144), 2: ("cpu.weight", 100, 10_000)}
CPU_PERIOD_US = 100_000
_SWEEP_ROUNDS = 50


class Hierarchy(msgspec.Struct, frozen=True):
    """One mounted cgroup tree in which we may make groups, and the controllers it has for us."""

    root: str
    version: Literal[1, 2]
    controllers: tuple[Controller, ...]
    swap: bool = False  # whether swap can be limited with memory


class Cgroups(msgspec.Struct, frozen=True):
    """What this machine offers. `kind` is for people: v2, v1, hybrid or none."""

    hierarchies: tuple[Hierarchy, ...] = ()

    @property
    def kind(self) -> str:
        versions = {hierarchy.version for hierarchy in self.hierarchies}
        return {frozenset({1}): "v1", frozenset({2}): "v2", frozenset({1, 2}): "hybrid"}.get(
            frozenset(versions), "none"
        )

    def has(self, controller: Controller) -> bool:
        return any(controller in hierarchy.controllers for hierarchy in self.hierarchies)


class Group(msgspec.Struct, frozen=True):
    """The cgroup directories of one sandbox."""

    dirs: tuple[str, ...] = ()

    def allow_swap(self, on: bool) -> None:
        """Where swap is limited apart from memory (v2) a sandbox has none, but while it sleeps as much as it may hold in memory.
        What is out when it wakes comes back as it is used."""
        for path in self.dirs:
            with contextlib.suppress(OSError):  # no such file here, or the sandbox has ended
                limit = Path(path, "memory.max").read_text() if on else "0"
                if Path(path, "memory.swap.max").exists():
                    Path(path, "memory.swap.max").write_text(limit)

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for memory."""
        for path in self.dirs:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    for line in Path(path, name).read_text().splitlines():
                        if line.startswith("oom_kill "):
                            return int(line.split()[1])
        return 0


class Recipe(msgspec.Struct, frozen=True):
    """Where a sandbox's groups go, and what is written into each: file name to value."""

    roots: tuple[str, ...]
    limits: tuple[dict[str, str], ...]


def find() -> Cgroups:
    """The hierarchies in which a group can really be made, with what it then has."""
    found: list[Hierarchy] = []
    taken: set[Controller] = set()
    for mount, version in _find_mounts():
        base = Path(mount, "rollyard")
        try:
            base.mkdir(exist_ok=True)
            if version == 2:
                _delegate(Path(mount), base)
            probe = base / f"probe-{os.getpid()}"
            probe.mkdir(exist_ok=True)
        except OSError:
            continue
        here: tuple[Controller, ...] = tuple(
            c for c in CONTROLLERS if c not in taken and (probe / _LIMIT_FILE[version][c]).exists()
        )
        swap = (probe / _SWAP_FILE[version]).exists()
        probe.rmdir()
        if here:
            if "cpu" in here and _is_in_no_group(version):
                _share_processors(base, version)
            taken.update(here)
            found.append(Hierarchy(str(base), version, here, swap))
    return Cgroups(tuple(found))


_LIMIT_FILE: dict[int, dict[Controller, str]] = {
    1: {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpu": "cpu.cfs_quota_us"},
    2: {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"},
}


_SWAP_FILE = {1: "memory.memsw.limit_in_bytes", 2: "memory.swap.max"}


def _find_mounts() -> Iterator[tuple[str, Literal[1, 2]]]:
    """Mount points of cgroup trees, v2 first."""
    v1: list[str] = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split()
        if kind == "cgroup2":
            yield target, 2
        elif kind == "cgroup":
            v1.append(target)
    for target in v1:
        yield target, 1


def find_bounds(cgroups: Cgroups) -> tuple[str, ...]:
    """The groups that bound the memory of all sandboxes. Those that can be given no group of their own stay in the one of this
    process."""
    trees = [tree for tree in cgroups.hierarchies if "memory" in tree.controllers]
    return tuple(str(Path(tree.root).parent) for tree in trees) or find_own()


def find_own() -> tuple[str, ...]:
    """The groups that bound the memory of this process, as far as they can be seen from here: its own, and those around it.
    In a container whose groups are named as on the host only the mount point itself is there, and is its group."""
    own = dict[str, str]()
    if not Path("/proc/self/cgroup").exists():  # a kernel without groups
        return ()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    found: list[str] = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        path = own.get("") if kind == "cgroup2" else own.get("memory") if "memory" in options.split(",") else None
        if path is not None and kind in ("cgroup", "cgroup2"):
            inner = Path(path.lstrip("/"))
            found += [str(Path(mount, part)) for part in (inner, *inner.parents) if ".." not in part.parts]
    return tuple(dict.fromkeys(found))


def _delegate(mount: Path, base: Path) -> None:
    wanted = " ".join(f"+{c}" for c in CONTROLLERS if c in (mount / "cgroup.controllers").read_text().split())
    if not wanted:
        return
    for path in (mount, base):
        if set(wanted.replace("+", "").split()) - set((path / "cgroup.subtree_control").read_text().split()):
            (path / "cgroup.subtree_control").write_text(wanted)


def _is_in_no_group(version: int) -> bool:
    """Whether this process, and so most others, compete with our group one by one: they are in no group of this tree."""
    own = "" if version == 2 else "cpu"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if own in controllers.split(","):
            return path == "/"
    return False


def _share_processors(base: Path, version: int) -> None:
    """A group's share is divided by the processors that it is busy on, a process's is not: on many of them our group would get
    less than one process on each."""
    name, one, most = _ALL_SHARE[version]
    with contextlib.suppress(OSError):  # not ours to write: then it stays as it is
        (base / name).write_text(str(min(most, one * (os.cpu_count() or 1))))


def default_memory_mb() -> int | None:
    """What a sandbox gets that names no limit of memory; None where the machine does not say what it has."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return max(1, int(total * MEMORY_SHARE) // 1024)


def recipe(cgroups: Cgroups, resources: Resources) -> Recipe:
    """A group in each hierarchy, with what a sandbox is given that names no limits."""
    if resources.memory_mb is None:
        resources = msgspec.structs.replace(resources, memory_mb=default_memory_mb())
    unknown = "memory" if resources.memory_mb is None else None
    roots: list[str] = []
    limits: list[dict[str, str]] = []
    for hierarchy in cgroups.hierarchies:
        files: dict[str, str] = {}
        for controller in hierarchy.controllers:
            if controller != unknown:
                files.update(_files(hierarchy, controller, resources))
        if files:
            roots.append(hierarchy.root)
            limits.append(files)
    return Recipe(tuple(roots), tuple(limits))


def _files(hierarchy: Hierarchy, controller: Controller, resources: Resources) -> dict[str, str]:
    if controller == "pids":
        return {"pids.max": str(resources.pids or DEFAULT_PIDS)}
    if controller == "cpu":
        if resources.cpus is None:
            return CPU_SHARE[hierarchy.version]
        quota = int(resources.cpus * CPU_PERIOD_US)
        if hierarchy.version == 2:
            return {"cpu.max": f"{quota} {CPU_PERIOD_US}"}
        return {"cpu.cfs_period_us": str(CPU_PERIOD_US), "cpu.cfs_quota_us": str(quota)}
    limit = str((resources.memory_mb or 0) * 2**20)
    files = {_LIMIT_FILE[hierarchy.version]["memory"]: limit}
    if hierarchy.swap:
        files[_SWAP_FILE[hierarchy.version]] = "0" if hierarchy.version == 2 else limit
    return files


def sweep(cgroups: Cgroups) -> None:
    """Remove groups that no process is in and whose zygote (the number they begin with) is dead. A process that has just
    died may still be leaving its group, so the busy ones are tried for a moment; some hold a sandbox that lives on."""
    left = [path for hierarchy in cgroups.hierarchies for path in Path(hierarchy.root).iterdir() if _is_orphan(path)]
    for _ in range(_SWEEP_ROUNDS):
        left = [path for path in left if not _remove(path)]
        if not left:
            return
        time.sleep(0.01)


def _is_orphan(path: Path) -> bool:
    pid, _, number = path.name.partition("-")
    return pid.isdigit() and number.isdigit() and not Path("/proc", pid).exists()


def _remove(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def rlimits(cgroups: Cgroups, resources: Resources) -> dict[str, int]:
    """What stands in for missing controllers, as names of the `resource` module. They bound each process or user, not the
    sandbox as a whole; address space is left alone, because node and the JVM reserve far more than they use."""
    out = {"RLIMIT_CORE": 0}
    if not cgroups.has("pids"):
        out["RLIMIT_NPROC"] = resources.pids or DEFAULT_PIDS
    if not cgroups.has("memory") and resources.memory_mb is not None:
        out["RLIMIT_DATA"] = resources.memory_mb * 2**20
    return out
