"""Who is to blame when an agent did not end well: itself, or the model that did not answer it. An agent whose model was away had
no chance to be judged; one that gave up by itself did, and so did one that filled the model's context or whose own request
was refused after the model had answered others."""

from __future__ import annotations

from rollyard.core.errors import AgentError, AgentParked, PolicyError, UpstreamError
from rollyard.gate import Session
from rollyard.gate.refusals import AGENTS_OWN
from rollyard.runs.rollout.agent_monitor import Ending

CONTEXT = "context"


def weigh(ending: Ending, session: Session | None, *, agent: str, idle_s: float) -> str | None:
    """Raises what it ended with. Gives the bound that ended it (of its budget, or `context`), where one did, and None where
    all went well."""
    if context_was_full(session):
        return CONTEXT
    if ending.how == "parked":
        raise AgentParked(
            f"no call in flight, no CPU and no output for {idle_s:g} s (limits.idle)",
            hint="see the log tail; raise limits.idle if the agent was only waiting",
        )
    if session is not None and session.exhausted is not None and (session.answered or session.refused is None):
        return session.exhausted
    done = ending.done
    bad_exit = ending.how == "exited" and ending.exit_code != 0
    spent_on_nothing = session is not None and session.exhausted is not None
    if not bad_exit and not spent_on_nothing and (done is None or done.ok is not False):
        return None
    if (broken := _last_call_failed(session)) is not None:
        status = session.refused.status if session is not None and session.refused is not None else None
        if status in AGENTS_OWN and session is not None and session.answered:
            raise AgentError(f"agent {agent} gave up after a request of its own was refused: {broken}")
        raise _policy_failed(f"the model's answers failed and the agent gave up: {broken}", status)
    said = f": {done.text}" if done is not None and done.text else ""
    raise AgentError(f"agent {agent} ended with exit code {ending.exit_code}{said}")


def context_was_full(session: Session | None) -> bool:
    """Whether the last thing an agent was told is that its prompt does not fit, after work that can be judged."""
    refused = session.refused if session is not None else None
    return session is not None and refused is not None and refused.context_full and session.answered > 0


def model_was_away(session: Session | None, limit_s: float) -> PolicyError | None:
    """Why an agent whose time ran out had no chance: it waited for one answer, or its last one was an error."""
    if context_was_full(session):
        return None
    waited = session.unanswered_s if session is not None else 0.0
    broken = f"no answer to a call for {waited:.0f} s" if waited >= limit_s / 2 else _last_call_failed(session)
    if broken is None:
        return None
    status = session.refused.status if session is not None and session.refused is not None else None
    return _policy_failed(f"the model's answers failed until the agent's time was over: {broken}", status)


def _policy_failed(message: str, status: int | None) -> PolicyError:
    return PolicyError(message) if status is None else UpstreamError(message, status=status)


def _last_call_failed(session: Session | None) -> str | None:
    if session is None:
        return None
    if session.refused is not None:
        return session.refused.cause
    records = session.trajectory.records
    return records[-1].error if records else None
