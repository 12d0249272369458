"""Dialects: bytes <-> `Call` and `Reply`, as pure functions. Read `codec.py` first, then one dialect."""

from rollyard.wire.route import Route, route

__all__ = ["Route", "route"]
