"""The relay: connections in and out of a sandbox that has no network, over one program's stdin and stdout.

A small program (`inside.py` or `inside.js`, whichever the sandbox can run) accepts on 127.0.0.1 and dials there; `mux.Relay` is
its host end. Many connections share the pipe, each with its own credit, so one slow reader stalls only itself. Nothing polls.
"""

from __future__ import annotations

from rollyard.sandbox.relay.mux import Relay, RelayListener, RelayStream

__all__ = ["Relay", "RelayListener", "RelayStream"]
