"""Real agents branch at an early and at a later call: the policy sees what it saw in the parent, and its new answer is done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.task import Task, VerifierSpec

pytestmark = [pytest.mark.anyio, pytest.mark.agent]
OFTEN = ("shell-agent",)
BY_TEXT = ("aider", "terminus-2")  # these act by what the model writes; a script drives them in words of its own
AGENTS = [name for name in ry.agents.names() if ry.agents.get(name).dialect is not None and name not in BY_TEXT]


def script(last):
    steps = [{"shell": "echo one > a.txt"}, {"shell": "cat a.txt"}, {"shell": "cat a.txt > b.txt"}, {"shell": "ls"}]
    return ry.policy.scripted({"steps": [*steps, {"shell": f"echo {last} > c.txt"}, {"text": "done"}]})


def cells():
    for name in AGENTS:
        marks = [pytest.mark.xdist_group(f"agent-{name}")]
        yield pytest.param(name, id=name, marks=marks if name in OFTEN else [*marks, pytest.mark.slow])


@pytest.mark.parametrize("name", list(cells()))
async def test_an_agent_branches_at_its_second_call_and_at_a_later_one(name, tmp_path):
    judge = VerifierSpec(kind="commands", options={"commands": ['test "$(cat a.txt b.txt c.txt)" = "one\none\nright"']})
    task = Task(id="t", instruction="Do as the tools say.", verifier=judge)
    async with ry.sandbox.backend("local") as backend, ry.Store.open(tmp_path / "runs.db") as store:
        async with (
            ry.Gate(script("wrong"), log=store) as gate,
            ry.Run([task], agent=name, sandbox=backend, gate=gate, store=store) as run,
        ):
            (parent,) = [r async for r in run]
        assert (parent.status, parent.reward) == ("completed", 0.0), parent.error
        calls = [record for record in parent.captured.records if record.kind == "agent"]
        for number in (1, 4):
            at = calls[number].id
            (child,) = await ry.branch(parent, at=at, policy=script("right"), store=store, sandbox=backend)
            assert (child.status, child.reward) == ("completed", 1.0), child.error
            own = next(record for record in child.captured.records if record.trainable)
            assert child.captured.prompt_ids(own.id) == parent.captured.prompt_ids(at)
            note(f"{name} at call {number + 1}: {'pinned' if child.pinned else 'equal'}, {started(child, own):.0f} ms")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.xdist_group(f"agent-{one}")) for one in AGENTS])
async def test_an_agent_that_was_cut_goes_on_to_the_files_of_one_that_was_not(name, tmp_path):
    task = Task(id="t", instruction="Do as the tools say.")
    files = {}
    async with ry.sandbox.backend("local") as backend, ry.Store.open(tmp_path / "runs.db") as store:
        for cut in (None, 3):
            async with (
                ry.Gate(script("right"), log=store) as gate,
                ry.Run(
                    [task], agent=name, sandbox=backend, gate=gate, store=store, max_calls=cut, collect=("*.txt",)
                ) as run,
            ):
                (done,) = [r async for r in run]
            files[cut] = texts(done)
        assert done.status == "budget" and len(files[3]) < len(files[None]) == 3
        (on,) = await ry.branch(done, at="end", policy=script("right"), store=store, sandbox=backend, max_calls=9)
        assert (on.status, texts(on)) == ("completed", files[None]), on.error


def texts(done):
    """What was collected, without the agent's own files."""
    return {name: data for name, data in done.files.items() if name.endswith(".txt")}


def started(child, own):
    """Milliseconds from the agent's start to its first own call."""
    (launch,) = [stage for stage in child.stages if stage.name == "launch"]
    return 1000 * (own.received_at - launch.started_at)


def note(line):
    """For the table of docs/branching.md."""
    if where := os.environ.get("BRANCHING_TABLE"):
        with Path(where).open("a") as table:
            table.write(f"{line}\n")
