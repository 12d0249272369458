"""An E2B-compatible server over a control plane: the published E2B SDKs open, drive and end instances of it.

`e2b_app(plane)` is an ASGI app over a plane's parts (`ephemeral_plane(backend)` has some); `rollyard serve plane` has it among
its APIs. Point a client at it with `E2B_API_URL` and `E2B_SANDBOX_URL` (both its address) and a key of the plane as
`E2B_API_KEY`; an `anonymous` one takes any. Not served, and refused by name: volumes, secrets, logs and URLs of ports inside.
"""

from __future__ import annotations

from rollyard.plane.compat.e2b.app import e2b_app

__all__ = ["e2b_app"]
