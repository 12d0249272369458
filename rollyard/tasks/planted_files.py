"""What an agent can leave so that programs of the judge do its bidding: looked at before it starts, put back before the tests.

Three things, each in its own file: what Python and pytest load unasked (`python_startup.py`), what git does unasked
(`git_settings.py`), links that lead the tests astray (`planted_links.py`). A fourth is guarded while the tests run: modules in
the working directory that stand before Python's own (`inside/safe_path.py`).
"""

from __future__ import annotations

import importlib.resources
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rollyard.core.protocols import Sandbox
from rollyard.tasks import git_settings, planted_links, python_startup
from rollyard.tasks.git_settings import Repository
from rollyard.tasks.look_scripts import LookScript, run_looks
from rollyard.tasks.planted_links import FoundLink
from rollyard.tasks.python_startup import KnownFiles, StartUp
from rollyard.tasks.verifiers.sandbox import SAFE_PATH

_RUNNERS = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging")
_GUARDED = frozenset((*sys.stdlib_module_names, *_RUNNERS))
_FILE_NAMES = re.compile(r"\b(\w+)(?:\.py\b|/)|\bmodule `?(\w+)")
_FIND_MODULES = (
    r"""find "$1" -maxdepth 4 \( -name node_modules -o -name .git \) -prune -o \( -type d -o -name '*.py' \) -print"""
)


class StateBefore(msgspec.Struct, frozen=True, kw_only=True):
    """How things were before the agent. `start_up` is None where a sealed verdict looks itself, in the pristine image."""

    start_up: StartUp | None = None
    links: Mapping[str, str] = {}
    repositories: Mapping[str, Repository] = {}
    modules: tuple[str, ...] = ()


class StateAfter(msgspec.Struct, frozen=True, kw_only=True):
    """How things are when the agent has ended. `start_up` is what `python_startup.list_script` printed."""

    start_up: bytes | None = None
    links: Mapping[str, FoundLink] | None = {}
    repositories: Mapping[str, Repository] = {}


async def look(sandbox: Sandbox, workdir: str, known: KnownFiles, *, start_up: bool = True) -> StateBefore:
    """What is there now. The caller knows that the agent has not run yet."""
    found = await python_startup.look(sandbox, workdir, known) if start_up else None
    if workdir.rstrip("/") == "":
        return StateBefore(start_up=found)
    scripts = (
        git_settings.list_script(workdir),
        LookScript(_FIND_MODULES, (workdir.rstrip("/"),)),
        planted_links.list_script((workdir,)),
    )
    repositories, modules, links = await run_looks(sandbox, "the working directory", scripts)
    return StateBefore(
        start_up=found,
        links={path: link.target for path, link in (planted_links.read_listed(links) or {}).items()},
        repositories=git_settings.read_listed(repositories),
        modules=_read_modules(modules or b""),
    )


async def look_pristine(fresh: Sandbox, workdir: str, seen: StateBefore | None, known: KnownFiles) -> StateBefore:
    """The same for a judge's own sandbox. What was seen in the agent's knows the task's files and setup too, so that only what
    Python loads unasked is looked for here."""
    if seen is None:
        return await look(fresh, workdir, known)
    return msgspec.structs.replace(seen, start_up=await python_startup.look(fresh, workdir, known))


async def look_again(sandbox: Sandbox, before: StateBefore, workdir: str, places: Sequence[str]) -> StateAfter:
    """What is there when the agent has ended, with the links below `places`. The judge's directories are not there yet."""
    libraries = before.start_up.libraries if before.start_up is not None else ()
    scripts = [planted_links.list_script([place for place in places if place.strip("/")])]
    if workdir.rstrip("/") != "":
        scripts.insert(0, git_settings.list_script(workdir))
    if before.start_up is not None:
        scripts.insert(0, python_startup.list_script(workdir, libraries))
    *listed, links = await run_looks(sandbox, "what the agent left", scripts)
    return StateAfter(
        start_up=listed.pop(0) if before.start_up is not None else None,
        repositories=git_settings.read_listed(listed.pop(0)) if listed else {},
        links=planted_links.read_listed(links),
    )


async def put_back(sandbox: Sandbox, before: StateBefore, now: StateAfter, known: KnownFiles) -> list[str]:
    """Undo what the agent added or changed; a note for each file."""
    start_up = before.start_up
    notes = await python_startup.put_back(sandbox, start_up, now.start_up, known) if start_up is not None else []
    return notes + await git_settings.restore_repositories(sandbox, before.repositories, now.repositories)


async def remove_links(sandbox: Sandbox, before: StateBefore, now: StateAfter, places: Sequence[str]) -> list[str]:
    kept = [place for place in places if place.strip("/")]
    return await planted_links.remove_links(sandbox, kept, before.links, now.links)


async def guard_modules(
    sandbox: Sandbox, before: StateBefore, workdir: str, texts: Iterable[str], user: str | None
) -> None:
    """Python's own modules before those of the working directory, less the ones that these texts of the task speak of."""
    names = {name for text in texts for match in _FILE_NAMES.finditer(text) for name in match.groups() if name}
    known = [path.removesuffix(".py") for path in before.modules]
    lines = [workdir.rstrip("/"), *sorted(names & _GUARDED), *known]
    code = importlib.resources.files("rollyard.inside").joinpath("safe_path.py").read_bytes()
    await sandbox.write(f"{SAFE_PATH}/sitecustomize.py", code, mode=0o644, user=user)
    await sandbox.write(f"{SAFE_PATH}/keep", "".join(f"{line}\n" for line in lines), mode=0o644, user=user)


def _read_modules(listed: bytes) -> tuple[str, ...]:
    """Modules and directories whose names are Python's own."""
    paths = listed.decode("utf-8", "replace").splitlines()
    return tuple(path for path in paths if path.rpartition("/")[2].removesuffix(".py") in _GUARDED)
