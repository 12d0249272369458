"""One table: how a rollout that did not end well is named, and what may be done with it.

An infrastructure failure never becomes a reward. `grade` False means that the verifier does not run and the reward stays
None; `trainable` False keeps its tokens out of every export; `retry` says whether the same attempt may be run again: what was
graded never is. Whose failure an unanswered model call is, `model_outage` says.
"""

from __future__ import annotations

from typing import NamedTuple

from rollyard.core.errors import (
    AgentParked,
    AgentTimeout,
    Boundary,
    BranchDiverged,
    ConfigError,
    Error,
    RolloutStale,
    UpstreamError,
)
from rollyard.core.rollout import Failure, Status


class Rule(NamedTuple):
    status: Status
    retry: bool
    grade: bool
    trainable: bool


# What each boundary's failure means. The agent's own faults are work to be judged; everything else is not.
TABLE: dict[Boundary, Rule] = {
    "sandbox": Rule("infra_error", retry=True, grade=False, trainable=False),
    "gate": Rule("infra_error", retry=True, grade=False, trainable=False),
    "policy": Rule("infra_error", retry=True, grade=False, trainable=False),
    "env": Rule("infra_error", retry=True, grade=False, trainable=False),
    "store": Rule("infra_error", retry=True, grade=False, trainable=False),
    "verifier": Rule("infra_error", retry=True, grade=False, trainable=False),
    "agent": Rule("agent_error", retry=False, grade=True, trainable=True),
}

# Endings that differ from their boundary's rule.
EXCEPTIONS: dict[type[Error], Rule] = {
    AgentTimeout: Rule("timeout", retry=False, grade=True, trainable=True),
    AgentParked: Rule("agent_error", retry=False, grade=True, trainable=False),
    BranchDiverged: Rule("cancelled", retry=False, grade=False, trainable=False),
    RolloutStale: Rule("cancelled", retry=False, grade=False, trainable=False),
}


def rule_for(error: BaseException, boundary: Boundary) -> Rule:
    for kind, rule in EXCEPTIONS.items():
        if isinstance(error, kind):
            return rule
    rule = TABLE[boundary]
    if isinstance(error, ConfigError):  # asking again would fail again
        return rule._replace(retry=False, grade=False, trainable=False)
    return rule


def classify(error: BaseException, *, stage: str, boundary: Boundary) -> tuple[Status, Failure]:
    """Name an error at the boundary it crossed: its own when it knows one, else the stage's."""
    crossed = (error.boundary if isinstance(error, Error) else None) or boundary
    rule = rule_for(error, crossed)
    failure = Failure(
        boundary=crossed,
        cause=type(error).__name__,
        message=str(error) or type(error).__name__,
        stage=stage,
        retry=rule.retry,
        grade=rule.grade,
        trainable=rule.trainable,
        hint=error.hint if isinstance(error, Error) else None,
        status=error.status if isinstance(error, UpstreamError) else None,
    )
    return rule.status, failure
