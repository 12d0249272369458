"""A user answers real agents: what the user says is the next thing that the model is told."""

from __future__ import annotations

import pytest

import rollyard as ry
from rollyard.core.task import Task, VerifierSpec

# `tests/runs/test_user_turns.py` is the ordinary one
pytestmark = [pytest.mark.anyio, pytest.mark.agent, pytest.mark.slow]
AGENTS = [name for name in ry.agents.names() if ry.agents.get(name).resume is not None]
cells = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(f"agent-{name}")) for name in AGENTS]
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
