"""Whose failure it is when an agent got no answer. This is the only place that says so.

**The model's side failed** when a call was refused by a closed or broken connection, timed out, was answered 5xx or 429, or with
401, 403 or 404 for our own key or model, and the agent got no later answer; or when none of its calls was answered. Then
there is nothing to judge, whatever the agent's exit code: no reward, boundary `policy`, and the attempt may run again.

**The agent's own request was refused** (400, 413, 422, a full context, a content filter, a model it was not given, a call that it
left itself) after the model had answered others: its doing, judged as it stands, never run again. Otherwise a losing agent
could void its attempt with one bad call.
"""

from __future__ import annotations

from rollyard.core.errors import (
    REFUSED_FOR_GOOD,
    AgentError,
    AgentParked,
    Error,
    PolicyError,
    StoreError,
    UpstreamError,
)
from rollyard.gate import Session
from rollyard.gate.refusals import AGENTS_OWN, StopReason
from rollyard.gate.session import EXCUSED_WAIT_S, GAVE_UP, RefusedCall
from rollyard.runs.rollout.agent_monitor import Ending


def is_agents_own(refused: RefusedCall, model: str) -> bool:
    """Whether a call was refused for what the agent put into it. `model` is the name that the agent was given."""
    if refused.reason is not None or refused.status in AGENTS_OWN or refused.status == GAVE_UP:
        return True
    return refused.status in REFUSED_FOR_GOOD and refused.status != 401 and refused.model not in ("", model)


def find_outage(session: Session | None, model: str, *, excused_wait_s: float = EXCUSED_WAIT_S) -> Error | None:
    """The model's failure by which an agent had no chance, or None. A call that still waits counts after `excused_wait_s`, and
    at once while none was answered."""
    if session is None:
        return None
    if session.broken is not None:
        return StoreError(f"the gate could not record the agent's calls: {session.broken}")
    waited, refused = session.unanswered_s, session.refused
    if waited >= excused_wait_s or (waited and not session.answered):
        return PolicyError(f"the model's answers failed: no answer to a call for {waited:.0f} s")
    if refused is None or (session.answered and is_agents_own(refused, model)):
        return None
    message = f"the model's answers failed: {refused.cause}"
    if refused.status is None or refused.status == GAVE_UP:
        return PolicyError(message)
    return UpstreamError(message, status=refused.status)


def find_stop_reason(session: Session | None) -> StopReason | None:
    """What ended an agent like a spent budget: its last request did not fit or was filtered, after work that can be judged."""
    if session is None or session.refused is None or not session.answered:
        return None
    return session.refused.reason


def judge_ending(ending: Ending, session: Session | None, *, agent: str, model: str, idle_s: float) -> str | None:
    """Raises what it ended with. Gives the bound that ended it (of its budget, its context or a filter), where one did, and
    None where all went well."""
    if (outage := find_outage(session, model)) is not None:
        raise outage
    if (stopped := find_stop_reason(session)) is not None:
        return stopped
    if ending.how == "parked":
        raise AgentParked(
            f"no call in flight, no CPU and no output for {idle_s:g} s (limits.idle)",
            hint="see the log tail; raise limits.idle if the agent was only waiting",
        )
    if session is not None and session.exhausted is not None:
        return session.exhausted
    done = ending.done
    if (ending.how != "exited" or ending.exit_code == 0) and (done is None or done.ok is not False):
        return None
    if session is not None and session.refused is not None:
        raise AgentError(f"agent {agent} gave up after a request of its own was refused: {session.refused.cause}")
    said = f": {done.text}" if done is not None and done.text else ""
    raise AgentError(f"agent {agent} ended with exit code {ending.exit_code}{said}")
