"""Root filesystems and what is laid over them: OCI images, layers with agents and toolchains, where both are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard.lazy import attach

if TYPE_CHECKING:
    from rollyard.images.store import ImageStore as ImageStore
    from rollyard.images.store import layer as layer
else:
    __getattr__, __dir__ = attach(__name__)  # hidden from type checkers, to which a misspelt name is an error
