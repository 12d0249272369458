"""The compatible APIs of `rollyard serve plane`, each driven by the real package with nothing but the printed variables."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

import rollyard as ry
from rollyard.core.errors import PlaneNotFound
from tests.plane.served import serving
from tests.plane.test_e2b import CLIENT, NEWEST, VERSIONS, holds
from tests.plane.venvs import interpreter, told, unless_there

pytestmark = pytest.mark.anyio
HERE = Path(__file__).parent
WORLDS = HERE.parents[1] / "examples" / "worlds"
E2B = ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY")


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_e2b_sdk_drives_the_plane(tmp_path, version):
    python = await asyncio.to_thread(interpreter, "e2b", version)
    async with serving(tmp_path) as env:
        holds(await told(python, CLIENT, env["E2B_API_URL"], env["E2B_API_KEY"]))
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            assert (await plane.usage())["used"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("version", [pytest.param(NEWEST, marks=unless_there("e2b", NEWEST))])
async def test_e2b_sandboxes_are_instances_with_the_planes_environments_quota_and_history(tmp_path, version):
    python = await asyncio.to_thread(interpreter, "e2b", version)
    async with serving(tmp_path, "--quota", "2") as env:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            await plane.envs.create("weather", "1.0", env={"CITY": "Oslo"})
            seen = await told(python, HERE / "e2b_plane_client.py", env={name: env[name] for name in E2B})
            made = await plane.instances.get(seen["id"])
            assert (made["state"], made["labels"], made["owner"]) == ("running", {"team": "a"}, "admin")
            assert (await plane.instances.read(made["id"], "/tmp/kept")) == b"kept"
            async with aiohttp.request("GET", seen["url"], headers={"E2b-Sandbox-Id": made["id"]}) as reply:
                assert await reply.text() == "kept"
            await plane.instances.delete(made["id"])
            with pytest.raises(PlaneNotFound):
                await plane.instances.get(made["id"])
            async with aiohttp.request("GET", f"{env['E2B_API_URL']}/health") as reply:
                assert (await reply.json())["status"] == "ok"
            headers = {"E2b-Sandbox-Id": made["id"]}
            async with aiohttp.request("GET", f"{env['E2B_API_URL']}/health", headers=headers) as reply:
                assert reply.status == 502
    assert seen["template"] == "weather@1.0" and seen["city"] == ["Oslo"]
    assert seen["no_env"][0] and "nothing@1.0" in seen["no_env"][1]
    assert seen["copied"] == "kept" and seen["forked"] == ["kept", ["blue"]]
    assert seen["second"] != "Sandbox" and seen["full"][0] == "RateLimitException"
    assert seen["paused"][:2] == ["paused", False] and seen["resumed"] == "kept" and seen["ends"] == [7, -7]
    assert seen["listed"]
    assert seen["boot"] == 36 and seen["no_proc"] in ("FileNotFoundException", "NotFoundException")
    metric = seen["metric"]
    assert metric["cpu_count"] >= 1 and 0 < metric["cpu_used_pct"] <= 100 and metric["late"] < 60
    assert 0 < metric["mem_used"] < metric["mem_total"] and 3_000_000 <= metric["disk_used"] < metric["disk_total"]
    assert seen["intervals"] == [True, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("version", [pytest.param(NEWEST, marks=unless_there("e2b", NEWEST))])
async def test_an_e2b_sandbox_that_pauses_at_its_end_is_kept_over_a_restart_and_comes_back(tmp_path, version):
    python, client = await asyncio.to_thread(interpreter, "e2b", version), HERE / "e2b_timeout_client.py"
    async with serving(tmp_path, engine="local") as env:
        begun = await told(python, client, "begin", env={name: env[name] for name in E2B})
    assert {name: seen for name, (_, seen) in begun.items()} == {
        "paused": [False, "pause", False],
        "woken": [False, "pause", True],
        "stopped": [False, "pause", False],
    }
    ids = {name: id for name, (id, _) in begun.items()}
    async with serving(tmp_path, engine="local") as env:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            seen = await told(python, client, "again", *ids.values(), env={name: env[name] for name in E2B})
            assert seen == {"listed": ["paused"] * 3, "paused": [True, True], "stopped": [True, True, False]}
            assert (await plane.instances.read(ids["woken"], "/tmp/count")).strip().isdigit()
            assert (await plane.instances.get(ids["woken"]))["state"] == "running"
            await plane.instances.delete_many(ids=list(ids.values()))


@pytest.mark.parametrize("version", [pytest.param(NEWEST, marks=unless_there("e2b", NEWEST))])
async def test_programs_are_every_replicas_and_outlive_the_one_that_started_them(tmp_path, version):
    """Two servers on one store; the first is killed without notice while a program of its client waits for a line."""
    python = await asyncio.to_thread(interpreter, "e2b", version)
    client = HERE / "e2b_replica_client.py"
    async with serving(tmp_path) as one, serving(tmp_path) as two:
        made = await told(python, client, "start", env={name: one[name] for name in E2B})
        one["process"].kill()
        await one["process"].wait()
        seen = await told(python, client, "go on", made["id"], str(made["pid"]), env={name: two[name] for name in E2B})
    assert made["pid"] in seen["listed"] and made["ended"] not in seen["listed"]
    assert seen["said"][0] == 3 and seen["said"][1].endswith("got it\n")
    assert seen["new"] > made["ended"] and seen["killed"] is False


async def test_the_fleet_sdk_makes_instances_of_the_plane(tmp_path):
    fleet = pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
    from fleet._async.exceptions import FleetAuthenticationError

    async with serving(
        tmp_path, "--worlds", str(WORLDS), "--fleet-tasks", str(WORLDS / "tickets" / "tasks.json")
    ) as env:
        sdk = fleet.AsyncFleet(api_key=env["FLEET_API_KEY"], base_url=env["FLEET_BASE_URL"])
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            made = await sdk.make("tickets:1.0.0", ttl_seconds=600, run_id="r1")
            (one,) = [one async for one in plane.instances.list()]
            assert (one["id"], one["owner"], one["state"]) == (made.instance_id, "admin", "running")
            assert (await made.reset(seed=2)).success
            await made.instance.load()
            rows = (await made.db("current").query("SELECT title FROM tickets WHERE id = ?", [1])).rows
            assert rows == [["Please order more coffee"]]
            assert made.urls.root.startswith(env["FLEET_BASE_URL"] + "/i/")
            async with ry.tools.RemoteTools(made.urls.root, env["FLEET_API_KEY"], timeout_s=30) as tools:
                assert "get_ticket" in [tool.name for tool in await tools.list()]
            (task, *_) = await sdk.load_tasks(env_key="tickets")
            checked = await task.verify_detailed_async(made)
            assert checked.success and checked.result is not None
            assert (await sdk.account()).instance_count == 1
            await made.close()
            assert [one async for one in plane.instances.list()] == []
            with pytest.raises(FleetAuthenticationError):
                await fleet.AsyncFleet(api_key="wrong", base_url=env["FLEET_BASE_URL"]).make("tickets")


SCRIPT = """
cases:
  - match: printer
    steps:
      - tool: list_tickets
        args: {}
      - tool: set_state
        args: {ticket_id: 1, state: closed}
      - text: done
  - match: submit_final_answer
    steps:
      - tool: submit_final_answer
        args: {answer: "no idea"}
      - text: done
"""


async def test_a_fleet_job_runs_rollouts_and_its_sessions_tell_what_happened(tmp_path):
    fleet = pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
    (tmp_path / "script.yaml").write_text(SCRIPT)
    tasks = ("--worlds", str(WORLDS), "--fleet-tasks", str(WORLDS / "tickets" / "tasks.json"))
    async with serving(tmp_path, *tasks, "--job-policy", f"scripted:{tmp_path / 'script.yaml'}") as env:
        sdk = fleet.Fleet(api_key=env["FLEET_API_KEY"], base_url=env["FLEET_BASE_URL"])
        job = await asyncio.to_thread(
            sdk.create_job, models=["local/scripted"], env_key="tickets", pass_k=2, max_steps=20
        )
        async with asyncio.timeout(240):
            while (await asyncio.to_thread(sdk.get_job, job.job_id)).status != "completed":
                await asyncio.sleep(0.5)
        listed = await asyncio.to_thread(sdk.list_job_sessions, job.job_id)
        groups = {group.task_id: group for group in listed.tasks}
        assert listed.total_sessions == 4
        closing, counting = groups["close-printer"], groups["count-open"]
        assert [one.status for one in closing.sessions] == ["completed"] * 2
        assert (closing.passed_sessions, closing.average_score) == (2, 1.0)
        assert (counting.passed_sessions, counting.average_score) == (0, 0.0)
        first = closing.sessions[0]
        assert first.verifier_execution.success and first.step_count == 3
        told = await asyncio.to_thread(sdk.get_session_transcript, first.session_id)
        assert [line.role for line in told.transcript][-1] == "assistant"
        assert any(line.role == "tool" and "printer" in str(line.content).lower() for line in told.transcript)
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            assert [one async for one in plane.instances.list()] == []
            page = await plane.bytes("GET", f"/page/rollouts/{first.session_id}")
            assert b"close-printer" in page
            traced = await plane.json("GET", f"/v1/trace/{first.session_id}")
            assert traced["instance"]["run_id"] == job.job_id and traced["reward"] == 1.0


async def test_fleet_sessions_that_clients_write_are_kept_and_jobs_without_a_policy_are_refused(tmp_path):
    fleet = pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
    async with serving(tmp_path) as env:
        sdk = fleet.Fleet(api_key=env["FLEET_API_KEY"], base_url=env["FLEET_BASE_URL"])

        def logged():
            session = sdk.start_session(model="local/x", job_id=sdk.trace_job("mine"))
            history = [{"role": "user", "content": "go"}]
            session.log(history, {"role": "assistant", "content": "going"})
            session.log([*history, {"role": "assistant", "content": "going"}], {"role": "assistant", "content": "gone"})
            session.complete()
            return session.session_id

        session_id = await asyncio.to_thread(logged)
        told = await asyncio.to_thread(sdk.get_session_transcript, session_id)
        assert [line.content for line in told.transcript] == ["go", "going", "gone"]
        headers = {"Authorization": f"Bearer {env['FLEET_API_KEY']}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            body = {"models": ["local/x"], "task_keys": ["a"]}
            async with session.post(f"{env['FLEET_BASE_URL']}/v1/jobs", json=body) as reply:
                assert reply.status == 501 and "--job-policy" in (await reply.json())["detail"]
            async with session.get(f"{env['FLEET_BASE_URL']}/v1/jobs") as reply:
                assert (await reply.json()) == {"jobs": [], "total": 0}
            async with session.get(f"{env['FLEET_BASE_URL']}/v1/sessions/ro_none/transcript") as reply:
                assert reply.status == 404
