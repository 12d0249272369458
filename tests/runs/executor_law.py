"""What every executor must do, as plain functions: a test of each executor calls them."""

from __future__ import annotations

import anyio

import rollyard as ry
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs import Tree

HELLO = "steps:\n  - shell: echo hello > out.txt\n  - text: done\n"
SLOW = "steps:\n  - sleep: 60\n"


def tasks(count):
    verifier = VerifierSpec(kind="commands", options={"commands": ['test "$(cat out.txt)" = hello']})
    return [Task(id=f"t{n}", instruction="x", verifier=verifier) for n in range(count)]


async def every_attempt_is_kept_once(store, options):
    """Finished rollouts come out while the run goes on, whole, and the store holds each attempt exactly once."""
    events = []

    async def sink(event):
        events.append(event.name)

    async with ry.Run(tasks(3), agent="shell-agent", attempts=2, parallel=3, store=store, sink=sink, **options) as run:
        assert (run.owed, run.done) == (6, 0)
        done = [rollout async for rollout in run]
    assert sorted((r.task.id, r.attempt) for r in done) == [(f"t{n}", a) for n in range(3) for a in range(2)]
    assert {(r.status, r.reward, len(r.trajectory.records)) for r in done} == {("completed", 1.0, 2)}
    assert await store.progress(run.id) == {"done": 6}
    kept = [e.event.name for e in await store.events(rollout_id=done[0].id)]
    assert kept[-1] == "rollout.committed" and {"sandbox.opened", "verdict", "agent.done"} <= set(kept)
    assert events.count("rollout.committed") == 6
    return run.id


async def a_tree_grows_to_its_leaves(store, options):
    """The children of a rollout come out of the same run; each goes on from its parent's second call."""
    tree = Tree(width=2, depth=1, at=1)
    async with ry.Run(tasks(1), agent="shell-agent", parallel=2, store=store, tree=tree, **options) as run:
        root, *children = [rollout async for rollout in run]
    at = root.trajectory.records[1].id
    assert [(r.parent_rollout, r.parent_call, r.replayed, r.reward) for r in children] == [(root.id, at, 1, 1.0)] * 2
    assert sorted(r.attempt for r in (root, *children)) == [0, 1, 2]


async def leaving_early_gives_the_attempts_back(store, options, backend):
    async with ry.Run(tasks(3), agent="shell-agent", parallel=3, store=store, **options) as run:
        with anyio.fail_after(60):
            while len(await backend.list({"rollyard.run": run.id})) < 3:
                await anyio.sleep(0.1)
    with anyio.fail_after(30):  # one whose opening was cut short is still dying
        while await backend.list({"rollyard.run": run.id}):
            await anyio.sleep(0.1)
    assert await store.progress(run.id) == {"owed": 3}
    assert await store.leases(run.id) == []
