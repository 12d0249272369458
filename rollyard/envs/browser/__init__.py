"""Browsers for agents that see a screen: Chromium in a sandbox of its own, the `computer` tool over it, and leases.

`leases.py` opens and ends browsers, `server.py` serves them (`rollyard serve browser`), `client.py` is how a task
environment borrows one. Client and server never import each other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.envs.browser.client import BrowserLeases as BrowserLeases
    from rollyard.envs.browser.client import LeasedBrowser as LeasedBrowser
    from rollyard.envs.browser.leases import Browsers as Browsers
    from rollyard.envs.browser.server import BrowserServer as BrowserServer

_NAMES = {
    "BrowserLeases": "rollyard.envs.browser.client",
    "Lease": "rollyard.envs.browser.client",
    "Browsers": "rollyard.envs.browser.leases",
    "BrowserServer": "rollyard.envs.browser.server",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'rollyard.envs.browser' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_NAMES)
