"""CLI coding agents: one file each, found by name through the entry points `rollyard.agents`, or read from a TOML file.

`get` finds an `Agent`, `refuse` says what it cannot honour, `render` turns it and a `Launch` into argv, environment and
files, `parse` turns its output into events, `Watchdog` tells a parked agent from a slow model. Starting one is the work of
`runs`; nothing here runs anything.
"""

from __future__ import annotations

from rollyard.agents.events import EventParser, parse
from rollyard.agents.registry import default_prompt, from_toml, get, names
from rollyard.agents.render import Rendered, admit, artifacts, presence_check, refuse, render
from rollyard.agents.watchdog import ActivitySample, Watchdog

__all__ = [
    "EventParser",
    "Rendered",
    "ActivitySample",
    "Watchdog",
    "admit",
    "artifacts",
    "default_prompt",
    "from_toml",
    "get",
    "presence_check",
    "names",
    "parse",
    "refuse",
    "render",
]
