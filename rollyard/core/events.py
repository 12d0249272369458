"""Events: append-only facts about a rollout, from whatever part saw them.

`AgentEvent` is what an agent's own output lines become; `Event` is what the store keeps of everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

STARTED = "rollout.started"
COMMITTED = "rollout.committed"  # kept in the same transaction as its rollout
POLICY_STOPPED = "policy.stopped"  # a run asks this policy no more; its attempts are owed
AgentEventKind = Literal["assistant", "reasoning", "tool_call", "tool_result", "usage", "error", "done", "raw"]


class AgentEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One typed line of an agent's output. `ok` is set on `done`: whether the agent itself says that it succeeded."""

    kind: AgentEventKind
    text: str = ""
    tool: str | None = None
    call_id: str | None = None
    ok: bool | None = None
    fields: Mapping[str, Any] = {}


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`name` is dotted and says who and what: `setup.command`, `sandbox.opened`, `agent.tool_call`, `stage.finished`."""

    at: float
    name: str
    rollout_id: str | None = None
    run_id: str | None = None
    fields: Mapping[str, Any] = {}
