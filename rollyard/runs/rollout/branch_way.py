"""How a rollout begins that branches off another one: from its parent's own session, or by running its commands again."""

from __future__ import annotations

import msgspec

from rollyard.core.branch_point import BranchPoint, How
from rollyard.core.errors import Unsupported
from rollyard.core.protocols import Backend
from rollyard.core.rollout import CallSnapshot, Rollout
from rollyard.runs.rollout.plan import RolloutPlan
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.services import find_services

_BEHIND = "a session is gone on from at a call, and not behind its end"
_NO_SNAPSHOT = (
    "there is no snapshot of the sandbox at that call (--snapshot-every), or no longer, or on another machine"
)


async def choose_way(
    plan: RolloutPlan, parent: Rollout, how: How, backend: Backend, provision: Provision
) -> RolloutPlan:
    """The plan with the snapshot that it starts from, where there is one, and whether the agent resumes in it."""
    assert plan.branch is not None
    start = await _find_start(plan.branch, parent, backend, provision)
    against = _find_hindrance(plan, parent, start)
    if how == "resume" and against is not None:
        raise _refusal(plan.branch, against)
    resumed = how != "replay" and against is None
    return msgspec.structs.replace(plan, start=start, resumed=resumed)


def check_resumable(point: BranchPoint, parent: Rollout) -> None:
    """Refuse what cannot be resumed wherever it is tried, before anything runs."""
    against = _BEHIND if point.is_behind else _NO_SNAPSHOT if point.call not in parent.snapshots else None
    if against is not None:
        raise _refusal(point, against)


def _refusal(point: BranchPoint, against: str) -> Unsupported:
    return Unsupported(f"branch point {point} cannot be resumed: {against}", hint="--how replay runs it again")


async def _find_start(
    point: BranchPoint, parent: Rollout, backend: Backend, provision: Provision
) -> CallSnapshot | None:
    """The parent's snapshot at the branch point, where this backend has it still."""
    start = parent.snapshots.get(point.call)
    if start is None or start.backend != backend.name or not await provision.has(start.image):
        return None
    return start


def _find_hindrance(plan: RolloutPlan, parent: Rollout, start: CallSnapshot | None) -> str | None:
    if plan.agent.resume is None:
        return f"agent {plan.agent.name!r} cannot go on from a session of its own"
    if plan.branch is not None and plan.branch.is_behind:
        return _BEHIND
    if start is None:
        return _NO_SNAPSHOT
    if start.background:
        return f"programs ran in the background there, which a snapshot has not: {', '.join(sorted(set(start.background)))}"
    if find_services(parent.task):
        return "services run beside the sandbox, and what they know is in no snapshot"
    if plan.hooks.after_setup:
        return "a hook acts on the sandbox before the agent starts"
    return None
