"""Links that an agent left in the judged directories and that must not lead the tests anywhere.

A link to `/tests/expected.txt` dangles until the judge uploads its tests; then a comparison with the expected file compares it
with itself. So links that lead nowhere, into the judge's own directories or into `/proc`, `/dev` and `/` are taken out, unless
they were there before the agent. They are looked at while the judge's directories do not exist.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rollyard.core.errors import VerifierError
from rollyard.core.protocols import Sandbox
from rollyard.core.sandbox import Exit
from rollyard.tasks.look_scripts import LookScript
from rollyard.tasks.verifiers.sandbox import HOME, LOGS, TESTS

_TIMEOUT_S = 60.0
_MAX_BYTES = 64 * 2**20
_NAMED = 20
_LONGEST = 4095  # bytes of a path that the kernel takes
_HOPS = 40  # as many as the kernel follows
_CLOSED = (TESTS, LOGS, HOME, "/proc", "/dev", "/sys")
_OPEN = ("/dev/null",)

# For each link: its path, target and what it leads to (N: nowhere), each ended by NUL. Not every `find` has -printf.
_LIST = r"""
for place; do
    shift
    if [ -e "$place" ] || [ -L "$place" ]; then set -- "$@" "$place"; fi
done
if [ $# -gt 0 ] && ! find "$@" -type l -printf '%p\0%l\0%Y\0' 2>/dev/null &&
    ! find / -maxdepth 0 -printf '' 2>/dev/null; then
    find "$@" -type l -exec sh -c 'for link; do
        [ -e "$link" ] && kind=f || kind=N
        printf "%s\0%s\0%s\0" "$link" "$(readlink "$link")" "$kind"; done' sh {} + 2>/dev/null
fi
true
"""
_REMOVE_ALL = r"""find "$@" -type l -exec rm -f -- {} +"""

Links = Mapping[str, str]


class FoundLink(msgspec.Struct, frozen=True):
    target: str
    dangles: bool


def list_script(places: Sequence[str]) -> LookScript:
    """Prints what `read_listed` reads."""
    return LookScript(_LIST, tuple(places))


def read_listed(listed: bytes | None) -> dict[str, FoundLink] | None:
    """Every link below the directories, by path; None: there are too many to look at."""
    if listed is None:
        return None
    parts = listed.decode("utf-8", "surrogateescape").split("\0")
    rows = zip(parts[::3], parts[1::3], parts[2::3], strict=False)
    return {path: FoundLink(target, kind in ("N", "L", "?")) for path, target, kind in rows}


async def remove_links(
    sandbox: Sandbox, places: Sequence[str], before: Links, found: Mapping[str, FoundLink] | None
) -> list[str]:
    """Take planted links out of these directories; a note for each, up to a few. The judge's directories are not there yet."""
    if found is None:
        await _run(sandbox, _REMOVE_ALL, places)
        return ["links of the agent were left behind: there are too many of them to look at"]
    targets = {path: link.target for path, link in found.items()}
    bad = {path: why for path, link in found.items() if (why := _fault(path, link, targets, before)) is not None}
    if not bad:
        return []
    named = [path.encode("utf-8", "surrogateescape") for path in bad]
    above = {_parent_of(path) for path in named if len(path) > _LONGEST}
    done = await _run(sandbox, "exec xargs -0 rm -f --", (), stdin=_join(p for p in named if len(p) <= _LONGEST))
    if not done.ok:
        raise VerifierError(f"links of the agent cannot be removed: {done.text.strip()[-400:]}")
    if above:  # no path leads to them, the tests' neither; only a walk does, as find's own
        await _run(sandbox, "exec xargs -0 sh -c 'find \"$@\" -type l -delete' sh", (), stdin=_join(sorted(above)))
    notes = [
        f"link left behind, {why}: {ascii(path)[1:-1]} -> {ascii(targets[path])[1:-1]}" for path, why in bad.items()
    ]
    return [*notes[:_NAMED], *([f"and {len(notes) - _NAMED} links more"] if len(notes) > _NAMED else [])]


def _join(paths: Iterable[bytes]) -> bytes:
    return b"".join(path + b"\0" for path in paths)


def _parent_of(path: bytes) -> bytes:
    """The deepest directory above it that a path can name."""
    return path[:_LONGEST].rpartition(b"/")[0]


def _fault(path: str, link: FoundLink, links: Links, before: Links) -> str | None:
    if before.get(path) == link.target:
        return None
    place = follow(path, links)
    if place is None or place == "/":
        return "it leads round in a circle" if place is None else "it leads to the root"
    if place not in _OPEN and any(place == top or place.startswith(f"{top}/") for top in _CLOSED):
        return "it leads to a place of the judge or of the system"
    return "it leads nowhere" if link.dangles else None


def follow(path: str, links: Links) -> str | None:
    """Where a path leads when these links are all there are; None: in a circle."""
    waiting, here, hops = path.split("/")[::-1], "/", 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            here = posixpath.dirname(here)
        elif part not in ("", "."):
            step = posixpath.join(here, part)
            target = links.get(step)
            if target is None:
                here = step
                continue
            hops += 1
            if hops > _HOPS:
                return None
            here = "/" if target.startswith("/") else here
            waiting += target.split("/")[::-1]
    return here


async def _run(sandbox: Sandbox, script: str, words: Sequence[str], stdin: bytes | None = None) -> Exit:
    user = "0" if sandbox.capabilities.users else None
    return await sandbox.exec(
        ["/bin/sh", "-c", script, "links", *words],
        cwd="/",
        user=user,
        env={"LC_ALL": "C"},
        stdin=stdin,
        timeout=_TIMEOUT_S,
        max_output=_MAX_BYTES,
    )
