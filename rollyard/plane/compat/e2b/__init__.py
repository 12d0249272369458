"""An E2B-compatible server over any backend: the published E2B SDKs open, drive and end sandboxes of this project.

`e2b_app(backend)` is an ASGI app without a store; in `rollyard serve plane` sandboxes are instances. Point a client at it with
`E2B_API_URL` and `E2B_SANDBOX_URL` (both its address) and any `E2B_API_KEY`, or the one key it was given. Not served, and
refused by name: volumes, secrets, terminals, network rules, logs, metrics and URLs of ports inside.
"""

from __future__ import annotations

from rollyard.plane.compat.e2b.app import e2b_app

__all__ = ["e2b_app"]
