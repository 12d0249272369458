"""shell-agent: small enough for the smallest model, and honest about how it ended."""

import pytest

import rollyard as ry
from rollyard.testing.agent import AgentFixture

pytestmark = [pytest.mark.anyio, pytest.mark.agent]


@pytest.fixture
async def fixture():
    async with ry.sandbox.backend("local") as backend:
        yield AgentFixture(agent=ry.agents.get("shell-agent"), backend=backend)


async def test_its_first_request_is_under_500_bytes(fixture):
    seen = await fixture.run(instruction="Write hello into out.txt")
    seen.check_solved()
    assert len(seen.calls[0].raw) < 500


async def test_long_output_is_cut_in_the_middle_and_a_bad_exit_code_is_said(fixture):
    seen = await fixture.run([{"shell": "seq 100000; exit 3"}, {"text": "done"}])
    (result,) = seen.calls[1].messages[-1].tool_results
    text = result.parts[0].text
    assert len(text) < 4100
    assert text.startswith("1\n2\n")
    assert text.endswith("100000\nexit code 3")


async def test_its_commands_do_not_inherit_the_key(fixture):
    seen = await fixture.run([{"shell": "env > env.txt"}, {"text": "done"}], collect=["env.txt"])
    assert fixture.key.encode() not in seen.rollout.files["/workspace/env.txt"]
