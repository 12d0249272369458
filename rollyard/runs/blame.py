"""Who is to blame when an agent did not end well: itself, or the model that did not answer it. An agent whose model was away had
no chance to be judged; one that gave up by itself did."""

from __future__ import annotations

from rollyard.core.errors import AgentError, AgentParked, PolicyError
from rollyard.gate import Session
from rollyard.runs.watch import Ending


def weigh(ending: Ending, session: Session | None, *, agent: str, idle_s: float) -> str | None:
    """Raises what it ended with. Gives the budget that ended it, where one did, and None where all went well."""
    if ending.how == "parked":
        raise AgentParked(
            f"no call in flight, no CPU and no output for {idle_s:g} s (limits.idle)",
            hint="see the log tail; raise limits.idle if the agent was only waiting",
        )
    if session is not None and session.exhausted is not None:
        return session.exhausted
    done = ending.done
    bad_exit = ending.how == "exited" and ending.exit_code != 0
    if not bad_exit and (done is None or done.ok is not False):
        return None
    if (broken := _last_call_failed(session)) is not None:
        raise PolicyError(f"the model's answers failed and the agent gave up: {broken}")
    said = f": {done.text}" if done is not None and done.text else ""
    raise AgentError(f"agent {agent} ended with exit code {ending.exit_code}{said}")


def model_was_away(session: Session | None, limit_s: float) -> str | None:
    """Why an agent whose time ran out had no chance: it waited for one answer, or its last one was an error."""
    waited = session.unanswered_s if session is not None else 0.0
    if waited >= limit_s / 2:
        return f"no answer to a call for {waited:.0f} s"
    return _last_call_failed(session)


def _last_call_failed(session: Session | None) -> str | None:
    records = session.trajectory.records if session is not None else ()
    return records[-1].error if records else None
