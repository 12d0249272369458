"""How a run's tree grows: which attempts a committed rollout adds, and which call of its parent a child goes on from."""

from __future__ import annotations

from rollyard.core.branch_point import BranchPoint
from rollyard.core.errors import StoreError
from rollyard.core.ids import new_id
from rollyard.core.lease import Attempt
from rollyard.core.rollout import Rollout
from rollyard.core.tree import Tree
from rollyard.runs.run.config import RunConfig
from rollyard.store import Store
from rollyard.trajectory.trajectory import Trajectory


def children_of(config: RunConfig, attempt: Attempt, done: Rollout) -> list[Attempt]:
    """What is owed once this rollout is committed, in the same transaction: a tree loses no branch to a crash."""
    tree, trajectory = config.tree, done.trajectory
    if tree is None or trajectory is None or (done.failure is not None and not done.failure.grade):
        return []
    level = tree.level_of(attempt.number, config.attempts) + 1
    if level > tree.depth or _call_of(tree, trajectory, level) is None:
        return []
    return [
        Attempt(
            id=new_id("att"),
            run_id=attempt.run_id,
            task_id=attempt.task_id,
            task_digest=attempt.task_digest,
            agent=attempt.agent,
            policy=attempt.policy,
            number=number,
            seed=None if config.seed is None else config.seed + number,
            image=attempt.image,
            gpus=attempt.gpus,
        )
        for number in tree.children_of(attempt.number, config.attempts)
    ]


async def find_point(store: Store, config: RunConfig, attempt: Attempt) -> BranchPoint | None:
    """Where an attempt branches off another: by its place in the tree, or as the run says for all."""
    tree = config.tree
    number = None if tree is None else tree.parent_of(attempt.number, config.attempts)
    if tree is None or number is None:
        return config.branch_point
    cell = (attempt.task_id, attempt.agent, attempt.policy)
    for other in await store.attempts(attempt.run_id):
        if (
            other.number == number
            and (other.task_id, other.agent, other.policy) == cell
            and other.rollout_id is not None
        ):
            trajectory = await store.trajectory(other.rollout_id)
            call = _call_of(tree, trajectory, tree.level_of(attempt.number, config.attempts))
            if call is not None:
                return BranchPoint(other.rollout_id, call)
    raise StoreError(f"attempt {attempt.id} branches off attempt {number}, and that has no rollout to branch off")


def _call_of(tree: Tree, trajectory: Trajectory, level: int) -> str | None:
    """The call that children of this level go on from."""
    answered = [record for record in trajectory.records if record.leaf is not None and record.finish != "budget"]
    own = [record.id for record in answered if record.kind == "agent"]
    return own[tree.at * level] if tree.at * level < len(own) else None
