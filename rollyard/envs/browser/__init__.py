"""Browsers for agents that see a screen: Chromium in a sandbox of its own, the `computer` tool over it, and leases.

`leases.py` opens and ends browsers, `server.py` serves them (`rollyard serve browser`), `client.py` is how a task
environment borrows one. Client and server never import each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard.lazy import attach

if TYPE_CHECKING:
    from rollyard.envs.browser.client import BrowserLeases as BrowserLeases
    from rollyard.envs.browser.client import LeasedBrowser as LeasedBrowser
    from rollyard.envs.browser.leases import Browsers as Browsers
    from rollyard.envs.browser.server import BrowserServer as BrowserServer
else:
    __getattr__, __dir__ = attach(__name__)  # hidden from type checkers, to which a misspelt name is an error
