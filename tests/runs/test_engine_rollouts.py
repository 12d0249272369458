"""Real agents solve a task in containers that have no network, through the one lifecycle (K9)."""

import pytest

import rollyard as ry
from rollyard.core.task import Task
from tests.runs.conftest import CHECK, HELLO

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow, pytest.mark.agent]


@pytest.mark.parametrize(("agent", "route"), [("pi", None), ("codex", None), ("pi", "socket"), ("codex", "exec")])
async def test_an_agent_solves_a_task_with_no_network(engine, agent, route):
    kind, host = engine
    async with ry.sandbox.backend(kind, host=host, route=route) as backend:
        done = await ry.run_rollout(
            "write out.txt", agent=agent, policy=ry.policy.scripted(HELLO), sandbox=backend, verify=[CHECK]
        )
        assert done.failure is None, (done.failure, done.log_tail)
        assert (done.status, done.reward, done.exit_code) == ("completed", 1.0, 0)
        assert (done.isolation, done.verdict.grade, done.calls) == ("container", "sealed", 2)
        assert "+hello" in done.diff
        assert await backend.list({"rollyard.rollout": done.id}) == []


async def test_a_task_with_a_dockerfile_is_built_by_the_engine(engine, tmp_path):
    kind, host = engine
    (tmp_path / "Dockerfile").write_text("FROM rollyard-host\nWORKDIR /srv/work\nRUN echo hello > given.txt\n")
    task = Task(id="built", instruction="copy it", build=str(tmp_path))
    steps = {"steps": [{"shell": "cp given.txt out.txt"}, {"text": "done"}]}
    async with ry.sandbox.backend(kind, host=host) as backend:
        done = await ry.run_rollout(
            task, agent="shell-agent", policy=ry.policy.scripted(steps), sandbox=backend, verify=[CHECK]
        )
    assert done.failure is None, (done.failure, done.log_tail)
    assert (done.status, done.reward) == ("completed", 1.0)
