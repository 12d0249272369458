"""What runs in a sandbox, told by its own /proc."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from rollyard.core.errors import SandboxError
from rollyard.core.protocols import Sandbox

Process = tuple[int, str]  # its number, and when it was started
_LIST = 'for p in /proc/[0-9]*; do read -r line 2>/dev/null < "$p/stat" && echo "$line"; done; echo "$$"'
_LIST_S = 30.0
_OWN = "rollyard"  # what the local sandbox's init is called, and each fork of it that is no program yet, or no longer
_PAUSES_S = (0.0, 0.02, 0.1, 0.5)


async def find_new(sandbox: Sandbox, known: Mapping[Process, str]) -> list[str]:
    """The names of programs that were not known. One that is about to end is given a moment."""
    left: dict[Process, str] = {}
    for pause_s in _PAUSES_S:
        await anyio.sleep(pause_s)
        left = {one: name for one, name in (await list_programs(sandbox)).items() if one not in known}
        if not left:
            break
    return list(left.values())


async def list_programs(sandbox: Sandbox) -> dict[Process, str]:
    """What runs in a sandbox by name, without those that are there to look."""
    done = await sandbox.exec(_LIST, timeout=_LIST_S)
    *lines, own = done.stdout.decode("utf-8", "replace").split("\n")[:-1] or [""]
    found: dict[int, tuple[int, str, str, str]] = {}
    for line in lines:
        head, _, rest = line.rpartition(")")
        number, _, name = head.partition(" (")
        fields = rest.split()
        if number.isdigit() and len(fields) > 19:
            found[int(number)] = (int(fields[1]), name, fields[0], fields[19])
    if not own.isdigit():
        raise SandboxError("the sandbox does not tell what runs in it", hint="its image needs /bin/sh, and /proc")
    looking = int(own)
    while looking > 1 and looking in found:
        looking = found.pop(looking)[0]
    return {
        (number, begun): name
        for number, (_, name, state, begun) in found.items()
        if state != "Z" and number > 1 and name != _OWN
    }
