"""What should have changed, compared on the host: expected files, or an expected patch.

`files` maps paths (relative to the working directory) to the content they must have, null for "must not exist"; `folder` names a
host directory of such files. `patch` compares the agent's patch with an expected one, file by file, by the lines removed and
added. `ignore_space` compares lines without their trailing white space and blank lines at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rollyard.core.errors import ConfigError, PathError
from rollyard.core.protocols import Policy, Sandbox, Verifier
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import VerifierSpec
from rollyard.tasks.verifiers.options import read_options

_MAX_FILE = 16 * 2**20
Changes = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    files: dict[str, str | None] = {}
    folder: str | None = None
    patch: str | None = None
    score: Literal["all", "fraction"] = "all"
    ignore_space: bool = True


def make(spec: VerifierSpec, policy: Policy | None) -> Verifier:
    options = read_options(spec, _Options)
    if not options.files and options.folder is None and options.patch is None:
        raise ConfigError("verifier 'diff': options: give files, folder or patch")
    wanted: dict[str, bytes | None] = {n: None if t is None else t.encode() for n, t in options.files.items()}
    if options.folder is not None:
        root = Path(options.folder)
        if not root.is_dir():
            raise ConfigError(f"verifier 'diff': options.folder: {root} is not a directory")
        wanted |= {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}

    async def diff(sandbox: Sandbox, rollout: Rollout) -> Verdict:
        checks: dict[str, bool] = {}
        notes: list[str] = []
        for name, content in wanted.items():
            found = await _read(sandbox, await _absolute(sandbox, name))
            checks[name] = _is_same(found, content, options.ignore_space)
            if not checks[name]:
                notes.append(f"{name}: {_describe(found, content)}")
        if options.patch is not None:
            if rollout.diff is None:
                return Verdict(status="failed", error="the rollout carries no patch to compare")
            checks |= _compare(
                changes(options.patch, options.ignore_space), changes(rollout.diff, options.ignore_space)
            )
        share = math.fsum(checks.values()) / len(checks) if checks else 0.0
        reward = share if options.score == "fraction" else float(share == 1.0)
        return Verdict(reward=reward, parts={"reward": reward, "matched": share}, checks=checks, log="\n".join(notes))

    return diff


async def _absolute(sandbox: Sandbox, name: str) -> str:
    return name if name.startswith("/") else f"{getattr(sandbox, 'cwd', '').rstrip('/')}/{name}"


async def _read(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        if (await sandbox.stat(path)).kind != "file":
            return None
        return await sandbox.read(path, max_bytes=_MAX_FILE)
    except PathError:
        return None


def _is_same(found: bytes | None, wanted: bytes | None, loose: bool) -> bool:
    if found is None or wanted is None or not loose:
        return found == wanted
    return _lines(found) == _lines(wanted)


def _lines(data: bytes) -> list[bytes]:
    return [line.rstrip() for line in data.rstrip().splitlines()]


def _describe(found: bytes | None, wanted: bytes | None) -> str:
    if found is None:
        return "is missing"
    return "should not exist" if wanted is None else "differs from what was expected"


def changes(patch: str, loose: bool) -> Changes:
    """Per file, the lines a unified diff removes and adds, in order."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    old, current = "", None
    for line in patch.splitlines():
        if line.startswith("--- "):
            old, current = _name(line), None
        elif line.startswith("+++ ") and current is None:
            current = found.setdefault(_name(line) if _name(line) != "/dev/null" else old, ([], []))
        elif line.startswith(("diff ", "index ")):
            current = None
        elif current is not None and line.startswith(("-", "+")):
            text = line[1:].rstrip() if loose else line[1:]
            current[line[0] == "+"].append(text)
    return {name: (tuple(removed), tuple(added)) for name, (removed, added) in found.items()}


def _name(line: str) -> str:
    name = line[4:].split("\t")[0].strip()
    return name[2:] if name.startswith(("a/", "b/")) else name


def _compare(wanted: Changes, found: Changes) -> dict[str, bool]:
    return {name: wanted.get(name) == found.get(name) for name in sorted({*wanted, *found})}
