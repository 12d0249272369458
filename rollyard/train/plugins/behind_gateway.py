"""A rollout for trainers that record model calls themselves (rLLM, Agent Lightning, NeMo Gym, AgentCore): the agent's
calls go to the trainer's gateway as they are, which sees every token; sandbox, setup and verdict are ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.rollout import Rollout
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.train.plugins.served_rollouts import RolloutsFailed

NO_KEY = "none"  # what a gateway without keys is sent: agents want one


async def run_behind(
    base_url: str,
    task: Any,
    *,
    agent: str,
    model: str,
    key: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Rollout:
    """`task` is a task's row or its JSON; `options` are those of `run_rollout`. A rollout without a verdict is an error, never a
    zero."""
    row: Any = msgspec.json.decode(task) if isinstance(task, str) else dict(task or {})
    if not isinstance(row, dict) or not row.get("instruction"):  # pyright: ignore[reportUnknownMemberType]
        raise ConfigError("the trainer's row has no task", hint="a field task with the task's row, or its JSON")
    given: dict[str, Any] = {**(options or {}), "mode": "black_box", "base_url": base_url, "key": key or NO_KEY}
    rollout = await run_rollout(row, agent=agent, model=model, **given)  # pyright: ignore[reportUnknownArgumentType]
    if rollout.reward is None:
        raise RolloutsFailed(f"rollout {rollout.id} has no verdict: {rollout.error or 'the task has no verifier'}")
    return rollout
