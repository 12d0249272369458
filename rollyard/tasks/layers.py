"""Read-only layers as a task writes them: an id (`ly_...`), or packages (`pip:pytest==9.2.0`, `npm:left-pad@1.3.0`).

Ids belong to one machine's store; packages travel. Versions must be pinned, or the task would mean different tools on
different days.
"""

from __future__ import annotations

import re

from rollyard.core.agent import LayerSpec
from rollyard.core.errors import ConfigError

_PIP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9.!+_-]+")
_NPM = re.compile(r"(@[a-z0-9~-][a-z0-9._~-]*/)?[a-z0-9~-][a-z0-9._~-]*@\d[A-Za-z0-9.+-]*")


def layer_spec(text: str, *, sandboxed: bool = False) -> LayerSpec | None:
    """What to build, or None when `text` is the id of a layer that exists. Packages are separated by commas. `sandboxed`: no
    code of theirs may run on this machine."""
    if text.startswith("ly_"):
        return None
    kind, _, packages = text.partition(":")
    wanted = tuple(name.strip() for name in packages.split(",") if name.strip())
    pattern = {"pip": _PIP, "npm": _NPM}.get(kind)
    if pattern is None or not wanted:
        raise ConfigError(f"layer {text!r} is not an id, 'pip:NAME==VERSION' or 'npm:NAME@VERSION'")
    for name in wanted:
        if not pattern.fullmatch(name):
            raise ConfigError(f"layer {text!r}: {name!r} must name one version exactly")
    return LayerSpec(pip=wanted, sandboxed=sandboxed) if kind == "pip" else LayerSpec(npm=wanted, sandboxed=sandboxed)
