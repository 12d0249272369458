"""What runs in a sandbox, told by its own /proc."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import anyio

from rollyard.core.errors import SandboxError
from rollyard.core.protocols import Sandbox

Process = tuple[int, str]  # its number, and when it was started
_LIST = 'for p in /proc/[0-9]*; do read -r line 2>/dev/null < "$p/stat" && echo "$line"; done; echo "$$"'
_LIST_S = 30.0
_OWN = "rollyard"  # what the local sandbox's init is called, and each fork of it that is no program yet, or no longer
_IDLE_WAIT_S = 10.0  # at most, for programs that never rest
_PAUSES_S = (0.0, 0.02, 0.1, 0.5)


class _Program(NamedTuple):
    """`ticks` are what it has used of a processor, in hundredths of a second."""

    process: Process
    name: str
    parent: int
    state: str
    ticks: int


async def find_new(sandbox: Sandbox, known: Mapping[Process, str]) -> list[str]:
    """The names of programs that were not known. One that is about to end is given a moment."""
    left: dict[Process, str] = {}
    for pause_s in _PAUSES_S:
        await anyio.sleep(pause_s)
        left = {one: name for one, name in (await list_programs(sandbox)).items() if one not in known}
        if not left:
            break
    return list(left.values())


async def wait_until_idle(sandbox: Sandbox, idle_s: float) -> bool:
    """Until none of the programs there has run, or waited for a processor, for so long. False where that did not come about."""
    began = quiet_since = anyio.current_time()
    before: dict[Process, int] = {}
    while (now := anyio.current_time()) < began + idle_s + _IDLE_WAIT_S:
        programs = await _look(sandbox)
        spent = {one.process: one.ticks for one in programs}
        if spent != before or any(one.state in "RD" for one in programs):
            before, quiet_since = spent, now
        elif now - quiet_since >= idle_s:
            return True
        await anyio.sleep(idle_s / 5)
    return False


async def list_programs(sandbox: Sandbox) -> dict[Process, str]:
    """The programs that run in a sandbox, by name, without the ones that list them."""
    return {one.process: one.name for one in await _look(sandbox)}


async def _look(sandbox: Sandbox) -> list[_Program]:
    done = await sandbox.exec(_LIST, timeout=_LIST_S)
    *lines, own = done.stdout.decode("utf-8", "replace").split("\n")[:-1] or [""]
    found: dict[int, _Program] = {}
    for line in lines:
        head, _, rest = line.rpartition(")")
        number, _, name = head.partition(" (")
        fields = rest.split()
        if number.isdigit() and len(fields) > 19:
            ticks = int(fields[11]) + int(fields[12])
            found[int(number)] = _Program((int(number), fields[19]), name, int(fields[1]), fields[0], ticks)
    if not own.isdigit():
        raise SandboxError("the sandbox does not tell what runs in it", hint="its image needs /bin/sh, and /proc")
    looking = int(own)
    while looking > 1 and looking in found:
        looking = found.pop(looking).parent
    return [one for number, one in found.items() if one.state != "Z" and number > 1 and one.name != _OWN]
