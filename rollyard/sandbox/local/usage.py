"""What a sandbox uses: processor time, memory and disk, as the host counts them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from rollyard.core.errors import Unsupported
from rollyard.core.sandbox import SandboxUsage
from rollyard.images import tree_pipe
from rollyard.sandbox.local.cgroups import CPU_PERIOD_US

_MEMORY = ("memory.current", "memory.usage_in_bytes")
_MEMORY_LIMIT = ("memory.max", "memory.limit_in_bytes")


def read_usage(dirs: Iterable[str], written: Path, upper: int | None) -> SandboxUsage:
    """`dirs` are its control groups; its changes are below `written`, or on the file system of `upper` that it has to itself."""
    groups = [Path(path) for path in dirs]
    memory = _read_number(groups, _MEMORY)
    if memory is None:
        raise Unsupported(
            "this machine does not count what a sandbox uses", hint="`rollyard doctor` says what is missing"
        )
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk = os.fstatvfs(upper) if upper is not None else os.statvfs(written)
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    return SandboxUsage(
        cpu_s=_read_cpu(groups),
        cpus=_read_quota(groups) or float(os.cpu_count() or 1),
        memory=memory,
        memory_total=min(_read_number(groups, _MEMORY_LIMIT) or whole, whole),
        memory_cache=_read_field(groups, "memory.stat", ("file", "total_cache")) or 0,
        disk=used if upper is not None else tree_pipe.usage(str(written)).bytes,
        disk_total=disk.f_blocks * disk.f_frsize,
    )


def _read_cpu(groups: list[Path]) -> float:
    """By the group where one counts, else by its processes: those that live, with all they have waited for."""
    if (micros := _read_field(groups, "cpu.stat", ("usage_usec",))) is not None:
        return micros / 1e6
    if (nanos := _read_number(groups, ("cpuacct.usage",))) is not None:
        return nanos / 1e9
    ticks = 0
    with contextlib.suppress(OSError):
        for pid in (groups[0] / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it ended
                fields = Path("/proc", pid, "stat").read_bytes().rpartition(b")")[2].split()
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _read_quota(groups: list[Path]) -> float | None:
    for group in groups:
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            return int(quota) / int(period)
    quota = _read_number(groups, ("cpu.cfs_quota_us",))
    return quota / CPU_PERIOD_US if quota is not None and quota > 0 else None


def _read_number(groups: list[Path], names: Iterable[str]) -> int | None:
    for path in (group / name for group in groups for name in names):
        with contextlib.suppress(OSError, ValueError):  # not there, or `max`
            return int(path.read_text())
    return None


def _read_field(groups: list[Path], name: str, fields: tuple[str, ...]) -> int | None:
    for group in groups:
        with contextlib.suppress(OSError):
            for line in (group / name).read_text().splitlines():
                if line.partition(" ")[0] in fields:
                    return int(line.split()[1])
    return None
