"""Real agents branch in every place that `python -m bench.branch` prints; what cannot be is refused by name. An agent that was
cut goes on to the files of one that was not."""

from __future__ import annotations

import pytest

import rollyard as ry
from bench.branch import AGENTS, HOWS, NUMBERS, PLACES, measure
from rollyard.core.task import Task

pytestmark = [pytest.mark.anyio, pytest.mark.agent]


def script(last):
    steps = [{"shell": "echo one > a.txt"}, {"shell": "cat a.txt"}, {"shell": "cat a.txt > b.txt"}, {"shell": "ls"}]
    return ry.policy.scripted({"steps": [*steps, {"shell": f"echo {last} > c.txt"}, {"text": "done"}]})


def cells():
    for name in AGENTS:
        for place in PLACES:
            yield pytest.param(name, place, id=f"{name}-{place}", marks=pytest.mark.xdist_group(f"agent-{name}"))


@pytest.mark.ordinary("shell-agent-parallel calls")
@pytest.mark.parametrize(("name", "place"), list(cells()))
async def test_an_agent_branches_or_is_refused_by_name(name, place, tmp_path):
    """`measure` fails where prompt, files or answer of a child are not as they must be."""
    async with ry.sandbox.backend("local") as backend, ry.Store.open(tmp_path / "runs.db") as store:
        found = {cell.how: cell for cell in await measure(name, place, store, backend)}
    assert tuple(found) == HOWS
    for how, cell in found.items():
        if cell.found == "none":
            assert place not in NUMBERS, "every agent comes there"
        elif how == "resume" and ry.agents.get(name).resume is None:
            assert cell.found == "refused" and f"agent '{name}' cannot go on from a session of its own" in cell.why
        elif place in NUMBERS:
            assert cell.found in ("equal", "pinned"), cell.why
        else:  # a history that was replaced, a sub-agent that still works: as it was, or refused with the difference
            assert cell.found in ("equal", "pinned") or cell.why.startswith("BranchDiverged: "), cell.why


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
