"""Real agents against the suite that ships: four of them in the ordinary run, the others, and the long cases, in the slow one."""

import pytest

import rollyard as ry
from rollyard.testing.agent import AgentFixture, cases, missing
from rollyard.testing.pytest_adapter import expect_passed
from rollyard.testing.suite import run_case

pytestmark = [pytest.mark.anyio, pytest.mark.agent]
ALWAYS = ("pi", "codex", "claude-code", "goose")
QUICK = ("W1", "W5", "O1", "T1", "T3", "M1", "H1", "H3")  # of those four; all cases run in the slow suite
ONCE = ("W5", "T3", "H3")  # pi's is enough
# tool-agent has no tools of its own, which the suite works with; remote tasks are its tests
AGENTS = [name for name in ry.agents.names() if ry.agents.get(name).dialect is not None and name != "tool-agent"]


def chosen():
    for name in AGENTS:
        for case in cases():
            often = name == "shell-agent" or (
                name in ALWAYS and case.id in QUICK and (name == "pi" or case.id not in ONCE)
            )
            marks = [pytest.mark.xdist_group(f"agent-{name}")]
            yield pytest.param(
                name,
                case,
                id=f"{name}-{case.id}",
                marks=marks if often and not case.slow else [*marks, pytest.mark.slow],
            )


@pytest.fixture
async def backend():
    async with ry.sandbox.backend("local") as opened:
        yield opened


@pytest.mark.parametrize(("name", "case"), list(chosen()))
async def test_an_agent_does_what_the_suite_asks(name, case, backend):
    fixture = AgentFixture(agent=ry.agents.get(name), backend=backend)
    expect_passed(await run_case(case, fixture, missing=missing(fixture), slow=True))
