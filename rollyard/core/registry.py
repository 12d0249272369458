"""Names to things, by entry points: built-ins and third parties come through the same door.

`load("rollyard.agents", "pi")` imports one entry and nothing else. A dotted path (`package.module:attribute`) is accepted
wherever a name is.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module, metadata
from typing import Any

from rollyard.core.errors import ConfigError, UnknownName

# group -> what one of its entries is called
_ONE = {
    "rollyard.agents": "agent",
    "rollyard.sandboxes": "sandbox backend",
    "rollyard.policies": "policy",
    "rollyard.verifiers": "verifier",
    "rollyard.tasksets": "taskset",
    "rollyard.datasets": "dataset adapter",
    "rollyard.engines": "engine",
    "rollyard.scanners": "scanner",
}


def names(group: str) -> list[str]:
    return sorted({entry.name for entry in _entries(group, tuple(sys.path))})


@cache
def _entries(group: str, path: tuple[str, ...]) -> metadata.EntryPoints:
    """Of every package on this path. A look reads a file of each, and every rollout looks for an agent and a verifier."""
    return metadata.entry_points(group=group)


def load(group: str, name: str) -> Any:
    if ":" in name and not name.startswith((".", "/")):
        module, _, attribute = name.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot load {name!r}: {error}") from error
    for entry in _entries(group, tuple(sys.path)).select(name=name):
        return entry.load()
    raise UnknownName(_ONE.get(group, group), name, names(group))
