"""Engines by name: opened from an option, chosen for a creation, named in a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollyard.core.errors import ConfigError, PlaneUnsupported, UnknownName
from rollyard.core.registry import load, names
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.engines.noop import NoopEngine
from rollyard.plane.engines.protocol import Engine


def engine(text: str, **options: Any) -> Engine:
    """`noop`, an engine by entry point, or a sandbox backend by its name. `name=URL` says where the engine's service is; for
    `remote`, another plane, it is also written `remote:URL`."""
    name, separator, url = text.partition(":" if text.startswith("remote:") else "=")
    if separator:
        options["url"] = url
    if name == "noop":
        return NoopEngine(**options)
    if name in names("rollyard.engines"):
        return load("rollyard.engines", name)(**options)
    if name in names("rollyard.sandboxes"):
        return BackendEngine(load("rollyard.sandboxes", name)(**options))
    raise UnknownName("engine", name, ["noop", *names("rollyard.engines"), *names("rollyard.sandboxes")])


def choose(engines: Mapping[str, Engine], name: str | None) -> Engine:
    """The engine of this name; the first one where none is asked for."""
    if name is None:
        if not engines:
            raise ConfigError("this plane has no engine", hint="start it with --engine local")
        return next(iter(engines.values()))
    if name not in engines:
        raise UnknownName("engine", name, list(engines))
    return engines[name]


def refuse(engine: Engine, engines: Mapping[str, Engine], capability: str, what: str) -> PlaneUnsupported:
    """The refusal that names who can."""
    able = [name for name, other in engines.items() if getattr(other.capabilities, capability)]
    hint = f"engines here that can: {', '.join(able)}" if able else "no engine of this server can; see /v1/engines"
    return PlaneUnsupported(f"engine {engine.name} cannot {what}", hint=hint)
