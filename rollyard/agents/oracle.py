"""oracle: runs the task's own solution, so that a task can be shown to be solvable. It calls no model."""

from __future__ import annotations

from rollyard.core.agent import Agent

agent = Agent(name="oracle", summary="runs the task's solution", argv=("bash", "{solution}"))
