"""`TaskEnv` over the plane's own environments."""

from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, EnvError, Unsupported
from rollyard.envs.fleet.provider import InstanceRequest
from rollyard.plane.client.provider import PlaneProvider
from rollyard.runs.envs import TaskEnv
from tests.plane.images import PLAIN_START, plain_image
from tests.plane.served import serving

pytestmark = pytest.mark.anyio
VERIFIER = """
def closed(env, final_answer=None):
    return float(env.db("current").table("tickets").eq("id", 1).first()["state"] == "closed")
"""


async def test_a_task_runs_on_an_environment_of_the_hub_and_is_verified_from_its_database(tmp_path):
    image = await plain_image(Path(__file__).with_name("desk_project.py"))
    async with serving(tmp_path) as env:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            databases = {"databases": {"current": "/env/desk.db"}}
            await plane.envs.create("desk", "1.0", image=image, start=PLAIN_START, extra=databases)
            provider = PlaneProvider(env["ROLLYARD_URL"], env["ROLLYARD_KEY"])
            config = {"env_key": "desk", "task_key": "close", "prompt": "close it", "verifier_code": VERIFIER}
            task = TaskEnv(config, provider=provider)
            seen = await task.reset(seed=7)
            assert [tool["function"]["name"] for tool in seen.observation["tools"]] == ["close_ticket"]
            rows = await task.query_db("SELECT title FROM tickets WHERE id = 2")
            assert rows.rows == [["seed 7"]]
            assert len([one async for one in plane.instances.list()]) == 1
            done = await task.step({"tool": "close_ticket", "params": {"ticket_id": 1}, "done": True})
            assert done.reward == 1.0 and done.terminated
            await task.close()
            assert [one async for one in plane.instances.list()] == []
            with pytest.raises(EnvError, match="no environment nothing"):
                await provider.make(InstanceRequest(env_key="nothing"))
            with pytest.raises(Unsupported):
                await provider.make(InstanceRequest(env_key="desk", region="moon"))
            await provider.aclose()


def test_what_is_missing_is_named_at_once(monkeypatch):
    monkeypatch.delenv("ROLLYARD_URL", raising=False)
    monkeypatch.delenv("ROLLYARD_KEY", raising=False)
    with pytest.raises(ConfigError, match="ROLLYARD_URL"):
        PlaneProvider()
    with pytest.raises(ConfigError, match="ROLLYARD_KEY"):
        PlaneProvider("http://127.0.0.1:1")
