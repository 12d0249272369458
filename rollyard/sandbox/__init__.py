"""Places to run programs in. `backend("local")` is the embedded one; others come through the same door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.core.protocols import Backend

GROUP = "rollyard.sandboxes"


def backend(name: str = "local", **options: Any) -> Backend:
    """The backend of this name (an entry point, or `package.module:attribute`), made with its own options."""
    from inspect import signature

    from rollyard.core.errors import ConfigError
    from rollyard.core.registry import load

    make = load(GROUP, name)
    taken = signature(make).parameters
    for option in options:
        if option not in taken and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            raise ConfigError(
                f"sandbox backend {name!r} has no option {option!r}; it takes: {', '.join(taken) or 'none'}"
            )
    return make(**options)


__all__ = ["backend"]
