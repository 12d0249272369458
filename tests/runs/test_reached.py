"""A rollout that is cut off keeps what it had reached by then."""

from __future__ import annotations

import anyio
import pytest

import rollyard as ry
from rollyard.runs.rollout.plan import Hooks
from tests.runs.conftest import HELLO

pytestmark = pytest.mark.anyio


async def test_setup_commands_that_ended_are_kept_when_a_later_one_runs_out_of_time(backend):
    done = await ry.run_rollout(
        "x", agent="nop", sandbox=backend, setup=["echo one", "echo two", "sleep 60"], limits=ry.Limits(setup=4)
    )
    assert [record.stdout for record in done.setup[:2]] == ["one\n", "two\n"]
    assert (done.failure.stage, done.failure.boundary, done.reward) == ("prepare", "sandbox", None)


async def test_setup_commands_and_the_sandbox_are_kept_when_a_hook_is_cut_off(backend):
    async def waits(sandbox, rollout):
        assert [record.command for record in rollout.setup] == ["true"] and rollout.sandbox_id == sandbox.id
        await anyio.sleep_forever()

    seen = []

    async def last(sandbox, rollout):
        seen.append(rollout)

    done = await ry.run_rollout(
        "x", agent="shell-agent", policy=ry.policy.scripted(HELLO), sandbox=backend, setup="true",
        limits=ry.Limits(setup=4), hooks=Hooks((waits,), (last,)),
    )  # fmt: skip
    assert [record.command for record in done.setup] == ["true"]
    assert done.failure.stage == "prepare" and "limits.setup" in done.failure.message
    assert done.gate_log_tail is not None and done.trajectory is not None and done.calls == 0
    assert [(one.id, one.failure) for one in seen] == [(done.id, done.failure)]
    assert await backend.list({"rollyard.rollout": done.id}) == []


@pytest.mark.slow
async def test_events_log_and_calls_are_kept_when_the_agents_time_is_over(backend):
    answers = ry.policy.scripted({"steps": [{"shell": "echo begun > out.txt"}, {"shell": "sleep 60"}]})
    done = await ry.run_rollout(
        "x",
        agent="shell-agent",
        policy=answers,
        sandbox=backend,
        limits=ry.Limits(agent=6),
        verify="test -f out.txt",
    )
    assert (done.status, done.failure.stage, done.reward) == ("timeout", "wait", 1.0)
    assert done.calls >= 2 and done.log_tail and "begun" in done.diff and done.exit_code is None
    assert [stage.name for stage in done.stages][-3:] == ["stop", "collect", "verify"]
