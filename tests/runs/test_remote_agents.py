"""Tasks of remote environments with agents that have a loop of their own, on Ray, in an evaluation and on the page: the real
`fleet-python` SDK, and real agents that reach the environment's tools through the gate."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

import rollyard as ry
from rollyard.page.app import page_app
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor
from rollyard.testing.serve import serve_app
from rollyard.trajectory.samples import samples
from tests.fleet_server import KEY
from tests.runs.test_remote_rollout import TASKS, Model, server, tasks, work

pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
pytestmark = [pytest.mark.anyio, pytest.mark.slow]
__all__ = ["server"]  # the fixture
STEPS = [("list_tickets", {}), ("set_state", {"ticket_id": 1, "state": "closed"})]
SCRIPT = """
steps:
  - tool: list_tickets
  - tool: set_state
    args: {ticket_id: 1, state: closed}
  - text: done
"""


class Chooses(Model):
    """Calls the environment's tools under the names that an agent gives them."""

    def __call__(self, call):
        self.calls.append(call)
        turn = sum(message.role == "assistant" for message in call.messages)
        if turn >= len(STEPS) or not call.tools:
            return {"text": "done"}
        name, arguments = STEPS[turn]
        (offered,) = [spec.name for spec in call.tools if spec.name.endswith(name)]
        return {"tool": offered, "args": arguments}


@pytest.mark.agent
@pytest.mark.parametrize("agent", ["opencode", "claude-code", "codex"])
async def test_an_agent_with_a_loop_of_its_own_works_in_a_remote_environment(server, agent):
    """Over MCP through the gate, under the rollout's own key: it learns neither the instance's address nor its key."""
    model = Chooses(None)
    done = await work(server, tasks()["close-printer"], model, agent=agent)
    assert (done.status, done.reward, done.failure) == ("completed", 1.0, None), done.error
    told = str([call.messages for call in model.calls]) + done.log.decode(errors="replace")
    assert "Printer on floor 3" in told and KEY not in told and server.url not in told
    assert any(row.trained and row.reward == 1.0 for row in samples(done).rows)
    assert await server.left() == [] and await server.backend.list({"rollyard.rollout": done.id}) == []


def one_task(tmp_path):
    """One of the world's tasks as a file of Fleet's, and a script that does it."""
    rows = json.loads(Path(TASKS.removesuffix("#fleet")).read_text())["tasks"]
    (tmp_path / "tasks.json").write_text(json.dumps([row for row in rows if row["task_key"] == "close-printer"]))
    (tmp_path / "script.yaml").write_text(SCRIPT)
    return f"{tmp_path}/tasks.json#fleet"


@pytest.mark.xdist_group("ray")
async def test_remote_tasks_run_on_ray_and_are_exported(server, tmp_path):
    """Workers elsewhere make the instances with the variables of their own environment."""
    pytest.importorskip("ray", reason="the package ray is not installed (pip install 'rollyard[ray]')")
    from tests.servers.ray_cluster import RayCluster

    source = one_task(tmp_path)
    config = RunConfig(policies={"policy": f"scripted:{tmp_path}/script.yaml"})
    env = {"FLEET_API_KEY": KEY, "FLEET_BASE_URL": server.url}
    with RayCluster(nodes=1, env=env) as cluster:
        async with ry.Store.open(tmp_path / "runs.db") as store:
            on_ray = executor("ray", address=cluster.address)
            options = {"attempts": 2, "config": config, "store": store, "executor": on_ray}
            async with ry.Run(ry.Taskset.load(source), agent="tool-agent", **options) as run:
                done = [rollout async for rollout in run]
            assert [rollout.reward for rollout in done] == [1.0, 1.0], [rollout.error for rollout in done]
            await ry.export(store, run.id, str(tmp_path / "batch.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "batch.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    assert server.seen.count("POST /v1/env/instances") == 2 and await server.left() == []


async def test_remote_tasks_are_evaluated_by_the_command_and_shown_on_the_page(server, tmp_path):
    config = tmp_path / "eval.toml"
    script = f"scripted:{tmp_path}/script.yaml"
    head = f'tasks = "{one_task(tmp_path)}"\nagents = ["tool-agent"]\nattempts = 2\n'
    config.write_text(f'{head}[policies]\nscript = "{script}"\n')
    words = (
        "eval",
        config,
        "--store",
        tmp_path / "runs.db",
        "--out",
        tmp_path / "report",
        "--json",
        "--display",
        "none",
    )
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard", *map(str, words), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await program.communicate()
    assert program.returncode == 0, err.decode()
    (line,) = json.loads(out)["lines"]
    assert (line["name"], line["scored"], line["reward"]["value"]) == ("tool-agent", 2, 1.0), line
    async with ry.Store.open(tmp_path / "runs.db") as store:
        (run,) = await store.list_runs()
        (first, second) = [rollout async for rollout in store.rollouts(run.id)]
        async with serve_app(page_app(store)) as url, aiohttp.ClientSession(url) as http:
            page = await (await http.get(f"/rollouts/{first.id}")).text()
            listed = await (await http.get(f"/runs/{run.id}")).text()
    assert "list_tickets" in page and "Printer on floor 3" in page and "close-printer" in page
    assert second.id in listed
    assert server.seen.count("POST /v1/env/instances") == 2 and await server.left() == []
