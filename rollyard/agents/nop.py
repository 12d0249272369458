"""nop: does nothing, so that a task, its setup and its verifier can be tried alone."""

from __future__ import annotations

from rollyard.core.agent import Agent

agent = Agent(name="nop", summary="does nothing")
