"""The relay's end inside a sandbox as a command: in Python or Node, whichever the image or a layer has."""

from __future__ import annotations

from importlib import resources

from rollyard.core.errors import GateUnreachable
from rollyard.core.sandbox import Exit

FIND = (
    "for p in python3 node; do command -v $p && exit; done; "
    "for p in /opt/rollyard/*/bin/python3 /opt/rollyard/*/bin/node; do [ -x $p ] && echo $p && exit; done; exit 1"
)


def command(found: Exit) -> list[str]:
    """What runs it, given what `FIND` said in the sandbox; `lines` and `unix:PATH` may follow as arguments."""
    if not found.ok:
        raise GateUnreachable(
            "the sandbox has neither python3 nor node to run the relay with", hint="add one of them to its image"
        )
    path = found.stdout.split(b"\n")[0].decode()
    name, flag = ("relay.js", "-e") if path.endswith("node") else ("relay.py", "-c")
    return [path, flag, resources.files("rollyard.inside").joinpath(name).read_text()]
