"""Watching, bundles, traces, metrics and readiness over real HTTP."""

import asyncio
import hashlib
import json

import aiohttp
import pytest

import rollyard as ry
from rollyard.core.errors import PlaneDraining, PlaneNotFound
from rollyard.core.plane import EnvSpec
from rollyard.plane.service.access import NewKey
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.pools import PutPool
from rollyard.plane.service.watch import Watcher
from rollyard.plane.storage.sql import SqlPlane
from rollyard.testing.serve import serve_app
from tests.plane.conftest import OWNER

pytestmark = pytest.mark.anyio
HOST = CreateInstance(image="host")
ONE_KIND = pytest.mark.parametrize("plane_url", ["sqlite"], indirect=True)


@pytest.fixture
async def served(plane):
    """The plane over HTTP, with a session that has an owner's key; `root` has an admin's."""
    keys = [
        await plane.access.issue(NewKey(role=role, owner=owner))
        for role, owner in (("owner", "ann"), ("admin", "root"))
    ]
    async with serve_app(plane.app) as plane.url:
        async with aiohttp.ClientSession(plane.url, headers={"Authorization": f"Bearer {keys[0][1]}"}) as plane.http:
            async with aiohttp.ClientSession(
                plane.url, headers={"Authorization": f"Bearer {keys[1][1]}"}
            ) as plane.root:
                yield plane
            plane.drain.stopping.set()


async def got(session, path, status=200, **more):
    async with session.get(path, **more) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def test_a_long_poll_answers_when_something_changes_and_tells_everything_once(served):
    cursor = (await got(served.http, "/v1/changes"))["next"]
    assert (await got(served.http, f"/v1/changes?cursor={cursor}"))["items"] == []
    waiting = asyncio.create_task(got(served.http, f"/v1/changes?cursor={cursor}&wait_s=30"))
    await asyncio.sleep(0.05)
    made = await served.instances.create(HOST, owner="ann")
    await served.instances.create(HOST, owner="bob")
    page = await asyncio.wait_for(waiting, 30)
    assert {one["id"] for one in page["items"]} == {made.id}
    served.clock.now += 1
    await served.instances.delete(made.id)
    later = await got(served.http, f"/v1/changes?cursor={page['next']}&wait_s=5")
    assert [(one["id"], one["state"]) for one in later["items"]] == [(made.id, "deleted")]
    assert (await got(served.http, f"/v1/changes?cursor={later['next']}"))["items"] == []
    await got(served.http, "/v1/changes?cursor=nonsense", 400)
    await got(served.http, "/v1/changes?wait_s=1e9", 400)


async def test_a_watcher_finds_what_was_written_late_and_many_at_once(plane):
    """A change bears its time before it is written: one from just before the last look is still told."""
    watcher = Watcher(plane.store, None, None, plane.clock.now)
    many = [await plane.instances.create(HOST, owner="ann") for _ in range(30)]
    assert {one.id for one in await watcher.news()} == {one.id for one in many}
    plane.clock.now -= 2
    late = await plane.instances.create(HOST, owner="ann")
    again = Watcher(plane.store, None, watcher.cursor, plane.clock.now)
    assert [one.id for one in await again.news()] == [late.id]
    assert await again.news() == []


@ONE_KIND
async def test_a_stream_says_what_there_is_and_then_what_changes_and_ends_with_the_server(served):
    first = await served.instances.create(HOST, owner="ann")
    async with served.http.get("/v1/watch", timeout=aiohttp.ClientTimeout(total=60)) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        event = (await stream.content.readuntil(b"\n\n")).decode()
        assert json.loads(event.partition("data: ")[2])["id"] == first.id
        assert (await stream.content.readuntil(b"\n\n")).startswith(b"event: current")
        served.clock.now += 1
        await served.instances.delete(first.id)
        state = "deleting"  # it may be seen on its way
        while state == "deleting":
            lines = (await stream.content.readuntil(b"\n\n")).decode().splitlines()
            state = json.loads(lines[2].removeprefix("data: "))["state"]
            served.clock.now += 1
        assert state == "deleted"
        served.drain.stopping.set()
        await stream.content.read()
    served.drain.stopping.clear()
    second = await served.instances.create(HOST, owner="ann")
    headers = {"Last-Event-ID": lines[0].removeprefix("id: ")}
    async with served.http.get("/v1/watch", headers=headers) as stream:
        assert (await stream.content.readuntil(b"\n\n")).startswith(b"event: current")
        event = (await stream.content.readuntil(b"\n\n")).decode()
        assert json.loads(event.partition("data: ")[2])["id"] == second.id


@ONE_KIND
async def test_one_instance_is_waited_for_until_it_is_in_another_state(served):
    made = await served.instances.create(HOST, owner="ann")
    path = f"/v1/instances/{made.id}?not=running&wait_s=30"
    waiting = asyncio.create_task(got(served.http, path))
    await asyncio.sleep(0.05)
    await served.instances.delete(made.id)
    assert (await asyncio.wait_for(waiting, 30))["state"] in ("deleting", "deleted")


@pytest.mark.adversarial
async def test_bundles_travel_by_signed_urls_and_only_what_was_signed(served):
    data = b"\x00bundle" * 1000
    sha256 = hashlib.sha256(data).hexdigest()
    asked = {"sha256": sha256, "size": len(data), "minutes": 0.5}
    async with served.http.post("/v1/bundles", json=asked) as answer:
        told = await answer.json()
    assert told["exists"] is False
    for wrong in (data + b"x", data[:-1], b"y" * len(data)):
        async with aiohttp.ClientSession() as nobody, nobody.put(told["url"], data=wrong) as answer:
            assert answer.status in (400, 413)
    async with served.http.post(f"/v1/bundles/{sha256}", json={}) as answer:
        assert answer.status == 404
    changed = told["url"].replace(sha256, hashlib.sha256(b"other").hexdigest())
    async with aiohttp.ClientSession() as nobody:
        async with nobody.put(changed, data=data) as answer:
            assert answer.status == 401
        async with nobody.put(told["url"], data=data) as answer:
            assert answer.status == 201
        async with nobody.get(told["url"]) as answer:
            assert answer.status == 401  # a URL to send is not one to fetch
        async with served.http.post(f"/v1/bundles/{sha256}", json={"minutes": 0.25}) as answer:
            url = (await answer.json())["url"]
        async with nobody.get(url) as answer:
            assert await answer.read() == data
        served.clock.now += 16
        async with nobody.get(url) as answer:
            assert answer.status == 410
        served.clock.now += 16
        async with nobody.put(told["url"], data=data) as answer:
            assert answer.status == 410
    for bad in ({"sha256": "x", "size": 1}, {"sha256": sha256, "size": 0}, {"sha256": sha256, "size": 1, "minutes": 0}):
        async with served.http.post("/v1/bundles", json=bad) as answer:
            assert answer.status in (400, 413)


async def test_a_chain_leads_from_an_instance_to_its_rollout_its_reward_and_the_policys_versions(tmp_path, clock, noop):
    from rollyard.core.rollout import Rollout, Verdict
    from rollyard.core.task import Task
    from rollyard.plane.parts import assemble

    async with ry.Store.open(tmp_path / "p.db") as store:
        parts = await assemble(SqlPlane(store.database), {"noop": noop}, clock=clock, runs=store)
        await parts.hub.create("e", "1", EnvSpec(), by=OWNER)
        made = await parts.instances.create(CreateInstance(env="e@1"), owner="ann")
        task, verdict = Task(id="t", instruction="x"), Verdict(reward=0.5)
        rollout = Rollout(id="ro_1", task=task, agent="pi", verdict=verdict, sandbox_id=made.id)
        await store.commit_rollout(rollout)
        await parts.instances.link(made.id, "ro_1")
        ann, bob, root = [
            (await parts.access.issue(NewKey(role=role, owner=owner)))[0]
            for role, owner in (("owner", "ann"), ("owner", "bob"), ("admin", "root"))
        ]
        for name in (made.id, "ro_1"):
            chain = await parts.traces.chain(name, ann)
            assert (chain["env"]["id"], chain["instance"]["id"], chain["reward"]) == ("e@1", made.id, 0.5)
            assert (chain["rollout"]["agent"], chain["rollout"]["verdict"]) == ("pi", "scored")
            with pytest.raises(PlaneNotFound):
                await parts.traces.chain(name, bob)
        await store.commit_rollout(Rollout(id="ro_2", task=Task(id="t", instruction="x")))
        assert (await parts.traces.chain("ro_2", root))["reward"] is None
        for caller, name in ((ann, "ro_2"), (root, "ro_3")):
            with pytest.raises(PlaneNotFound):
                await parts.traces.chain(name, caller)


async def test_metrics_count_requests_by_route_and_show_what_lives(served):
    await served.pools.put("p", PutPool(size=2, instance=HOST))
    await served.pools.fill()
    await served.instances.create(HOST, owner="ann")
    await got(served.http, "/v1/usage")
    await got(served.http, "/v1/instances/inst_x", 404)
    await served.sweeper.once()
    async with served.root.get("/metrics") as answer:
        text = await answer.text()
    for line in (
        'rollyard_plane_requests_total{api="native",method="GET",route="/v1/usage",status="200"} 1.0',
        'rollyard_plane_requests_total{api="native",method="GET",route="/v1/instances/{id}",status="404"} 1.0',
        'rollyard_plane_request_seconds_count{api="native",route="/v1/usage"} 1.0',
        'rollyard_plane_instances{engine="noop",state="running"} 3.0',
        'rollyard_plane_pool_live{pool="p"} 2.0',
        'rollyard_plane_swept_total{what="ended"} 0.0',
    ):
        assert line in text, (line, text)
    async with served.http.get("/metrics") as answer:
        assert answer.status == 403


@ONE_KIND
async def test_readiness_tells_the_room_there_is_and_a_stopping_server_takes_nothing_new(served):
    await served.instances.create(HOST, owner="ann")
    told = await got(served.http, "/ready")
    assert (told["ready"], told["engines"]["noop"]) == (True, {"live": 1, "max": None, "free": None})
    served.drain.stopping.set()
    assert (await got(served.http, "/ready", 503))["draining"] is True
    async with served.http.post("/v1/instances", json={"image": "host"}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, PlaneDraining.code)
    await got(served.http, "/v1/instances")
    served.drain.stopping.clear()
