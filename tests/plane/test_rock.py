"""ROCK's API, driven by the real rl-rock package."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

import rollyard as ry
from tests.plane.images import PLAIN_START, plain_image
from tests.plane.served import serving
from tests.plane.venvs import interpreter, told, unless_there

pytestmark = pytest.mark.anyio
HERE = Path(__file__).parent
VERSION = "1.11.0"


@pytest.mark.parametrize("version", [pytest.param(VERSION, marks=unless_there("rl-rock", VERSION))])
async def test_the_real_package_drives_sandboxes_and_plays_an_environment(tmp_path, version):
    python = await asyncio.to_thread(interpreter, "rl-rock", version)
    image = await plain_image(HERE / "game_project.py")
    async with serving(tmp_path) as env:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            await plane.envs.create("game", "1", image=image, start=PLAIN_START)
            where = {"ROCK_BASE_URL": env["ROCK_BASE_URL"]}
            seen = await told(python, HERE / "rock_client.py", "game@1", env=where, timeout=240)
            assert [one async for one in plane.instances.list()] == []
    assert seen["alive"] and seen["execute"] == ["out\n", "err\n", 3]
    assert seen["shell"] == "/tmp\nblue round" and seen["again"] == "/tmp"
    assert "exit code 2" in seen["raised"] and seen["silent"] == ["grüße", 1]
    assert "slept" in seen["nohup"]
    assert (seen["read"], seen["upload"], seen["uploaded"]) == ("written", True, "uploaded")
    assert seen["attached"] == ["host", "512m"]
    assert "is gone here" in seen["restart"] and "no instance" in seen["gone"] or "is gone" in seen["gone"]
    assert "use_kata_runtime" in seen["kata"]
    assert seen["game"]["first"] == ["guess", {"seed": 7}]
    assert seen["game"]["steps"] == [["no", 0.0, False, False, {}], ["yes", 1.0, True, False, {}]]


async def test_a_wrong_key_and_a_command_without_end_are_told(tmp_path):
    async with serving(tmp_path) as env, aiohttp.ClientSession() as session:
        place = f"{env['ROCK_BASE_URL']}/apis/envs/sandbox/v1"
        wrong = f"{env['ROLLYARD_URL']}/rock/wrong/apis/envs/sandbox/v1"
        async with session.post(f"{wrong}/start_async", json={"image": "host"}) as reply:
            assert reply.status == 401

        async def asked(name, **fields):
            async with session.post(f"{place}/{name}", json=fields) as reply:
                return await reply.json()

        box = (await asked("start_async", image="host"))["result"]["sandbox_id"]
        assert (await asked("create_session", sandbox_id=box))["status"] == "Success"
        late = await asked("run_in_session", sandbox_id=box, command="sleep 60", timeout=0.5)
        assert late["status"] == "Failed"
        gone = await asked("run_in_session", sandbox_id=box, command="true")
        assert gone["status"] == "Failed" and "no session" in gone["message"]
        assert (await asked("stop", sandbox_id=box))["status"] == "Success"


@pytest.mark.slow
async def test_a_session_is_every_replicas_and_outlives_the_one_that_opened_it(tmp_path):
    """Two servers on one store; the first is killed without notice."""

    async def asked(session, env, name, **fields):
        place = f"{env['ROCK_BASE_URL']}/apis/envs/sandbox/v1"
        async with session.post(f"{place}/{name}", json=fields) as reply:
            return await reply.json()

    async with serving(tmp_path) as one, serving(tmp_path) as two, aiohttp.ClientSession() as session:
        box = (await asked(session, one, "start_async", image="host"))["result"]["sandbox_id"]
        assert (await asked(session, one, "create_session", sandbox_id=box))["status"] == "Success"
        again = await asked(session, two, "create_session", sandbox_id=box)
        assert again["status"] == "Failed" and "there is a session" in again["message"]
        said = await asked(session, one, "run_in_session", sandbox_id=box, command="cd /tmp; colour=blue; echo one")
        assert said["result"]["output"] == "one"
        one["process"].kill()
        await one["process"].wait()
        said = await asked(session, two, "run_in_session", sandbox_id=box, command="pwd; echo $colour")
        assert said["result"]["output"] == "/tmp\nblue"
        long = await asked(
            session, two, "run_in_session", sandbox_id=box, command="seq 100000 | tail -n 99999; false", check="silent"
        )
        assert long["result"]["exit_code"] == 1 and long["result"]["output"].endswith("\n100000")
        said = await asked(session, two, "run_in_session", sandbox_id=box, command="echo last")
        assert said["result"]["output"] == "last"
        await asked(session, two, "run_in_session", sandbox_id=box, command="exit 0")
        assert (await asked(session, two, "create_session", sandbox_id=box))["status"] == "Success"
        assert (await asked(session, two, "close_session", sandbox_id=box))["status"] == "Success"
        gone = await asked(session, two, "run_in_session", sandbox_id=box, command="true")
        assert gone["status"] == "Failed" and "no session" in gone["message"]
        assert (await asked(session, two, "stop", sandbox_id=box))["status"] == "Success"
