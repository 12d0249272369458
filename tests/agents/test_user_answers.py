"""Real agents go on from their own session at an early call, after parallel tool calls and at a late one: what the policy sees is
what it saw in the parent, no command runs again, and the new answer is done."""

from __future__ import annotations

import pytest

import rollyard as ry
from rollyard.core.branch_point import RESUME_MARK
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs.rollout.kept_snapshots import remove_snapshots
from tests.agents.test_branching import note, started

pytestmark = [pytest.mark.anyio, pytest.mark.agent, pytest.mark.slow]  # `tests/runs/test_resume.py` is the ordinary one
AGENTS = [name for name in ry.agents.names() if ry.agents.get(name).resume is not None]
CELLS = {"call 2": 1, "after parallel tool calls": 2, "call 8": 7}


def script(last, *, at):
    """A word in `c.txt` at call `at`; before it, what can be told apart when it runs twice."""
    steps = [
        {"shell": "date +%s.%N >> a.txt"},
        {"parallel": [{"shell": "echo 1 >> b.txt"}, {"shell": "echo 2 >> b.txt"}]},
    ]
    steps += [{"shell": f"echo {number} >> b.txt; cat b.txt"} for number in range(5)]
    steps = [*steps[:at], {"shell": f"echo {last} > c.txt"}, {"shell": "cat c.txt"}, {"text": "done"}]
    return ry.policy.scripted({"steps": steps})


cells = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(f"agent-{name}")) for name in AGENTS]
)


@cells
async def test_an_agent_resumes_at_an_early_call_after_parallel_ones_and_at_a_late_one(name, tmp_path):
    judge = VerifierSpec(kind="commands", options={"commands": ['test "$(cat c.txt)" = right']})
    task = Task(id="t", instruction="Do as the tools say.", verifier=judge)
    async with ry.sandbox.backend("local") as backend, ry.Store.open(tmp_path / "runs.db") as store:
        for cell, number in CELLS.items():
            async with (
                ry.Gate(script("wrong", at=number), log=store) as gate,
                ry.Run(
                    [task],
                    agent=name,
                    sandbox=backend,
                    gate=gate,
                    store=store,
                    snapshot_every=number,
                    collect=("*.txt",),
                ) as run,
            ):
                (parent,) = [r async for r in run]
            assert (parent.status, parent.reward) == ("completed", 0.0), parent.error
            at = [record for record in parent.captured.records if record.kind == "agent"][number].id
            kept = parent.snapshots[at]
            assert kept.background == ()
            (child,) = await ry.branch(
                parent,
                at=at,
                how="resume",
                policy=script("right", at=number),
                store=store,
                sandbox=backend,
                collect=("*.txt",),
            )
            assert (child.status, child.reward, child.resumed) == ("completed", 1.0, True), child.error
            own = next(record for record in child.captured.records if record.trainable)
            assert child.captured.prompt_ids(own.id) == parent.captured.prompt_ids(at)
            paths = [one for one in parent.files if one.endswith(("/a.txt", "/b.txt"))]
            assert paths and all(child.files[one] == parent.files[one] for one in paths)
            for path in child.captured.branches:
                assert not any(RESUME_MARK in message.text for message in path.messages)
            await remove_snapshots((parent, child), backend)
            pinned = "pinned" if child.pinned else "equal"
            opened = next(stage for stage in child.stages if stage.name == "provision").duration_s
            note(
                f"{name} resumed at {cell}: {pinned}, snapshot {1000 * kept.took_s:.0f} ms, open {1000 * opened:.0f} ms, "
                f"first call {started(child, own):.0f} ms"
            )


@cells
async def test_an_agent_is_answered_by_a_user_and_goes_on(name, tmp_path):
    """The user's words are the last thing that the model is told, after all that was said before; nothing else is between."""
    user = tmp_path / "user.json"
    user.write_text('{"steps": ["Now write blue into b.txt."]}')

    def assistant(call):
        said = [message.text for message in call.messages if message.role == "user"]
        results = sum(len(message.tool_results) for message in call.messages)
        if "blue" in said[-1]:
            return {"text": "done"} if results else {"shell": "echo blue > b.txt"}
        return {"text": "What shall I write?"}

    task = Task(
        id="t",
        instruction="Ask me what to write.",
        verifier=VerifierSpec(kind="commands", options={"commands": ['test "$(cat b.txt)" = blue']}),
    )
    async with ry.sandbox.backend("local") as backend, ry.Store.open(tmp_path / "runs.db") as store:
        done = await ry.run_rollout(
            task,
            agent=name,
            policy=ry.policy.scripted(assistant),
            sandbox=backend,
            store=store,
            user=f"scripted:{user}",
        )
        assert (done.status, done.reward) == ("completed", 1.0), (done.error, done.log_tail[-2000:])
        own = [record for record in done.captured.records if record.kind == "agent"]
        assert [record.kind for record in done.captured.records if record.kind in ("agent", "user")] == [
            *("agent", "user", "agent", "agent", "user")
        ]
        asked = [message for message in done.captured.messages(own[1].id) if message.role in ("user", "assistant")]
        assert "What shall I write?" in asked[-2].text and "Now write blue into b.txt." in asked[-1].text
        note(f"{name} with a user: {len(ry.samples(done).rows)} rows of the agent")
