"""Places to run programs in. `backend("local")` is the embedded one; others come through the same door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.core.protocols import Backend

GROUP = "rollyard.sandboxes"


def backend(name: str = "local", **options: Any) -> Backend:
    """The backend of this name (an entry point, or `package.module:attribute`), made with its own options."""
    from rollyard.core.registry import load

    return load(GROUP, name)(**options)


__all__ = ["backend"]
