"""The relay: connections in and out of a sandbox that has no network, over a program's stdin and stdout, or a pair of files.

A small program (`inside/relay.py` or `inside/relay.js`, whichever the sandbox can run) accepts on 127.0.0.1 and dials there;
`mux.HostRelay` is its host end. Many connections share the pipe, each with its own credit, so one slow reader stalls only itself.
Nothing polls. `port_access.RelayAccess` keeps it up over a sandbox's lifetime; `program` is the command to start in the sandbox;
`filepair` stands in for the pipe where a backend's programs have no stdin.
"""

from __future__ import annotations

from rollyard.sandbox.relay.mux import HostRelay, RelayListener, RelayStream
from rollyard.sandbox.relay.port_access import RelayAccess

__all__ = ["HostRelay", "RelayListener", "RelayStream", "RelayAccess"]
