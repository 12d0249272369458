"""A rollout that is still under way is branched while one of its calls is held."""

from __future__ import annotations

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.core.task import Task, VerifierSpec
from tests.runs.test_branch import CHECK, script

pytestmark = pytest.mark.anyio


async def test_children_begin_where_their_parent_is_held_and_the_parent_goes_on(tmp_path, backend):
    held, go_on, rollouts = anyio.Event(), anyio.Event(), []

    async def answer(call):
        said = sum(message.role == "assistant" for message in call.messages)
        if said == 1:
            rollouts.append(call.rollout_id)
            held.set()
            await go_on.wait()
            return {"shell": "echo wrong > c.txt"}
        return {"text": "done"} if said else {"shell": "echo one > a.txt"}

    task = Task(id="t", instruction="x", verifier=VerifierSpec(kind="commands", options={"commands": [CHECK]}))
    async with (
        ry.Store.open(tmp_path / "runs.db") as store,
        ry.Gate(ry.policy.scripted(answer), log=store) as gate,
        ry.Run([task], agent="shell-agent", sandbox=backend, gate=gate, store=store) as run,
        anyio.create_task_group() as group,
    ):
        ended = []

        async def follow():
            ended.extend([done async for done in run])

        group.start_soon(follow)
        await held.wait()
        options = {"policy": script("right"), "store": store, "sandbox": backend}
        with pytest.raises(ConfigError, match="is still under way"):
            await ry.branch(rollouts[0], at="end", **options)
        options["task"] = task
        children = await ry.branch(rollouts[0], at="end", n=2, **options)
        (again,) = await ry.branch(rollouts[0], at=0, **options)
        with pytest.raises(ConfigError, match="works on task 't', and not on this 'other'"):
            await ry.branch(rollouts[0], at="end", **{**options, "task": Task(id="other", instruction="x")})
        assert not ended
        go_on.set()
    (parent,) = ended
    assert (parent.id, parent.status, parent.reward) == (rollouts[0], "completed", 0.0)
    first, second, _ = parent.captured.records
    for child in children:
        assert (child.status, child.reward, child.replayed) == ("completed", 1.0, 1), child.error
        assert (child.parent_rollout, child.parent_call) == (parent.id, f"after:{first.id}")
        own = next(record for record in child.captured.records if record.trainable)
        assert child.captured.prompt_ids(own.id) == parent.captured.prompt_ids(second.id)
    assert (again.status, again.reward, again.parent_call, again.replayed) == ("completed", 1.0, first.id, 0)
