"""The isolation level: how strongly this machine, for this user, can isolate a program.

    full        namespaces and cgroups      filesystem, processes, network, limits
    no_cgroups  namespaces, rlimits         as full, with weak limits
    no_proc     namespaces without /proc    inside a container that refuses a fresh proc: /proc is empty
    landlock    Landlock, seccomp, rlimits  files, TCP connections; processes and loopback are shared with the host
    none        nothing                     only when it is asked for by name

Decided by really making one (`inner/trial.py`), never from a version; remembered until the next boot, or until something is
mounted where it matters.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from rollyard.core.cache import replace_file
from rollyard.core.home import private_dir
from rollyard.core.sandbox import Isolation
from rollyard.images import mount_table
from rollyard.images.host import SYSTEM_LINKS
from rollyard.sandbox.local.cgroups import Cgroups
from rollyard.sandbox.local.ids import IdMap
from rollyard.sandbox.local.journal import PACKAGES

Level = Literal["full", "no_cgroups", "no_proc", "landlock", "none"]
NAMESPACED: tuple[Level, ...] = ("full", "no_cgroups", "no_proc")
LEVELS: tuple[Level, ...] = (*NAMESPACED, "landlock", "none")  # the strongest first
ISOLATION: dict[Level, Isolation] = {**dict.fromkeys(NAMESPACED, "namespace"), "landlock": "landlock", "none": "none"}
_FORMAT = "3"
_TRIED = ("/usr", *(f"/{name}" for name in SYSTEM_LINKS), "/dev", "/proc")  # what a trial takes mounts of
_TRIAL_S = 30.0
_CODE = "import sys; sys.path.append(sys.argv.pop()); from rollyard.sandbox.local.inner.trial import main; main()"


class Trial(msgspec.Struct, frozen=True):
    """What was found. `error` says why there is no full namespace sandbox; `view` whether programs can be
    traced, and so be shown a root of their own where there are no namespaces."""

    namespaces: bool
    proc: bool
    error: str | None
    landlock: int
    view: bool = False


def trial(root: Path, maps: list[IdMap]) -> tuple[IdMap, Trial]:
    """The first map that gives namespaces and what was found with it; else the last, and what was found without."""
    for ids in maps[:-1]:
        found = _recall_trial(root, ids)
        if found.namespaces:
            return ids, found
    return maps[-1], _recall_trial(root, maps[-1])


def _recall_trial(root: Path, ids: IdMap) -> Trial:
    """The result for this boot, kernel, user, map, mounts and rights, or a new one."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    user = f"{os.geteuid()} {os.getegid()} {ids}"
    key = f"{_FORMAT} {boot} {platform.release()} {user} {sys.version_info[:2]} {_mounts()} {_rights()}"
    place = private_dir(root) / f"trial-{ids.kind}.json"
    try:
        saved = json.loads(place.read_bytes())
        if saved["key"] == key:
            return msgspec.convert(saved["trial"], Trial)
    except (OSError, ValueError, KeyError, msgspec.ValidationError):
        pass  # none yet, or of another version: try again
    found = _try(ids)
    with suppress(OSError):  # where nothing can be kept it is tried again next time
        replace_file(place, msgspec.json.encode({"key": key, "trial": found}))
    return found


def _rights() -> str:
    """Differs in a container, in a chroot and under a filter, which may all keep their things in the same directory."""
    wanted = ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Seccomp_filters")
    rows = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    found = {name: value.strip() for name, value, *_ in rows if name in wanted}
    root = Path("/").stat()
    return f"{[found.get(name) for name in wanted]} {root.st_dev}:{root.st_ino}"


def _mounts() -> str:
    """Changes when something is mounted at or below a directory that a trial takes, or is taken away there."""
    tried = tuple(f"{place}/" for place in _TRIED)
    rows = [row[2:] for row in mount_table.read() if f"{row.point}/".startswith(tried)]
    return hashlib.sha256(repr(sorted(rows)).encode()).hexdigest()[:16]


def _try(ids: IdMap) -> Trial:
    argv = [sys.executable, "-I", "-S", "-c", _CODE, msgspec.json.encode(ids).decode(), str(PACKAGES)]
    done = subprocess.run(argv, env={}, cwd="/", capture_output=True, timeout=_TRIAL_S, check=False)
    try:
        return msgspec.json.decode(done.stdout, type=Trial)
    except msgspec.DecodeError:
        return Trial(False, False, done.stderr.decode(errors="replace")[-500:] or "the trial ended early", 0)


def reach_level(found: Trial, cgroups: Cgroups) -> Level:
    if found.namespaces and not found.proc:
        return "no_proc"
    if found.namespaces:
        return "full" if cgroups.has("pids") and cgroups.has("memory") else "no_cgroups"
    return "landlock" if found.landlock >= 1 else "none"
