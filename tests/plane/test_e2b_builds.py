"""What the E2B API keeps of templates is in the plane's storage: any server on it answers, and one that died loses nothing."""

import asyncio
import time

import aiohttp
import pytest

from rollyard.core.sandbox import Resources
from rollyard.plane.compat.e2b import e2b_app
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.e2b.templates import Templates
from rollyard.plane.parts import ephemeral_plane
from rollyard.plane.service.builds import hosts_of_builds
from rollyard.plane.service.create_request import CreateInstance
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.testing.serve import serve_app
from tests.plane.served import serving as serving_plane

pytestmark = pytest.mark.anyio
STEPS = {"fromImage": "e2bdev/base", "steps": [{"type": "RUN", "args": ["echo built > /tmp/who"]}]}


async def settled(client, build):
    """The status of a build once it has ended."""
    async with asyncio.timeout(120):
        while True:
            async with client.get(f"/templates/{build['templateID']}/builds/{build['buildID']}/status") as answer:
                told = await answer.json()
            if told["status"] in ("ready", "error"):
                return told
            await asyncio.sleep(0.1)


async def log_of(client, build):
    """All lines of a build's log, a page at a time."""
    seen = 0
    while True:
        place = f"/templates/{build['templateID']}/builds/{build['buildID']}/status"
        async with client.get(place, params={"logsOffset": str(seen)}) as answer:
            page = (await answer.json())["logEntries"]
        if not page:
            return
        seen += len(page)
        for line in page:
            yield line["message"]


async def request(client, name):
    async with client.post("/v3/templates", json={"name": name}) as answer:
        assert answer.status == 202
        return await answer.json()


async def start(client, build, **asked):
    place = f"/v2/templates/{build['templateID']}/builds/{build['buildID']}"
    async with client.post(place, json={**STEPS, **asked}) as answer:
        return answer.status


@pytest.mark.slow
async def test_a_templates_steps_reach_the_hosts_of_the_operator_and_all_they_print_is_kept(tmp_path):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, LocalBackend() as backend:
        port = server.sockets[0].getsockname()[1]
        hosts = hosts_of_builds(f"allow:mirror.test:{port}@127.0.0.1")
        words = "import urllib.request as r; print(r.urlopen('http://{}:{}/', timeout=20).read())"
        async with (
            ephemeral_plane(backend, build_hosts=hosts) as plane,
            serve_app(e2b_app(plane, anonymous=True)) as url,
        ):
            async with aiohttp.ClientSession(url) as client:
                told, lines = {}, {}
                for host in ("mirror.test", "elsewhere.test"):
                    build = await request(client, host.partition(".")[0])
                    fetch = f'seq 300 && python3 -c "{words.format(host, port)}"'
                    assert await start(client, build, steps=[{"type": "RUN", "args": [fetch]}]) == 202
                    told[host] = await settled(client, build)
                    lines[host] = [line async for line in log_of(client, build)]
        assert told["mirror.test"]["status"] == "ready", told["mirror.test"]
        assert told["elsewhere.test"]["status"] == "error"
        counted = [str(n) for n in range(1, 301)]
        assert [[line for line in said if line.isdigit()] for said in lines.values()] == [counted, counted]
        assert "b'hello'" in lines["mirror.test"] and "b'hello'" not in lines["elsewhere.test"]


async def test_a_server_tells_and_opens_what_another_builds(tmp_path):
    async with LocalBackend(root=tmp_path / "home") as backend, ephemeral_plane(backend) as plane:
        apps = [e2b_app(plane, anonymous=True, secret="s" * 20) for _ in range(2)]
        async with serve_app(apps[0]) as one, serve_app(apps[1]) as two:
            async with aiohttp.ClientSession(one) as first, aiohttp.ClientSession(two) as second:
                build = await request(first, "mine")
                assert await start(first, build) == 202
                assert await start(second, build) == 409
                told = await settled(second, build)
                assert told["status"] == "ready", told
                assert any("echo built" in line["message"] for line in told["logEntries"])
                async with second.post("/sandboxes", json={"templateID": "mine"}) as answer:
                    made = await answer.json()
                    assert answer.status == 201
                box = {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}
                async with first.get("/files?path=/tmp/who", headers=box) as answer:
                    assert await answer.read() == b"built\n"


async def test_a_build_whose_server_died_is_begun_anew_by_the_server_that_is_asked(tmp_path):
    async with LocalBackend(root=tmp_path / "home") as backend, ephemeral_plane(backend) as plane:
        async with serve_app(e2b_app(plane, anonymous=True)) as url, aiohttp.ClientSession(url) as client:
            build = await request(client, "mine")
            builds = Templates(plane.store).builds
            kept = await builds.get(build["templateID"], build["buildID"])
            left = await plane.instances.create(CreateInstance(image="host"), owner="local")
            kept.value.state, kept.value.asked, kept.value.sandbox = "building", STEPS, left.id
            assert await builds.put(kept, kept.value, due_at=time.time() - 1.0)
            told = await settled(client, build)
            assert told["status"] == "ready", told
            assert [one.id async for one in plane.instances.all()] == []  # what the dead one had opened is gone, too


async def test_a_build_that_is_carried_out_is_let_alone(tmp_path):
    async with LocalBackend(root=tmp_path / "home") as backend, ephemeral_plane(backend) as plane:
        async with serve_app(e2b_app(plane, anonymous=True)) as url, aiohttp.ClientSession(url) as client:
            build = await request(client, "mine")
            builds = Templates(plane.store).builds
            kept = await builds.get(build["templateID"], build["buildID"])
            kept.value.state, kept.value.asked = "building", STEPS
            assert await builds.put(kept, kept.value, due_at=time.time() + 600.0)
            place = f"/templates/{build['templateID']}/builds/{build['buildID']}/status"
            async with client.get(place) as answer:
                assert (await answer.json())["status"] == "building"
            assert (await builds.get(build["templateID"], build["buildID"])).record.revision == 2


async def test_templates_and_their_files_are_kept_under_their_owner(plane):
    found = Templates(plane.store, part=4)
    template, build = await found.begin("ann", "mine:v1", ["v2"], Resources())
    assert (sorted(template.tags), build.template) == (["v1", "v2"], template.id)
    again, second = await found.begin("ann", "mine", [], Resources())
    assert again.id == template.id and [one.id for one in await found.builds_of(again)] == [build.id, second.id]
    assert await found.find("bob", "mine") is None and await found.find("bob", template.id) is None
    assert (await found.find("ann", f"{template.id}:v1"))[0].id == (await found.find("ann", "ann/mine"))[0].id
    with pytest.raises(E2bRefusal, match="waiting"):
        await found.ready("ann", "mine:v1")

    async def stream(*parts):
        for part in parts:
            yield part

    await found.take_archive("ann", "hash", stream(b"abc", b"defg", b"hi"))
    assert [part async for part in found.read_archive("ann", "hash")] == [b"abcd", b"efgh", b"i"]
    assert (await found.has_archive("ann", "hash"), await found.has_archive("bob", "hash")) == (True, False)
    kept = await found.build(again, second.id)
    kept.value.state, kept.value.image = "ready", "snap_" + "1" * 20
    assert await found.builds.put(kept, kept.value) and await found.builds.put(kept, kept.value) is None
    await found.note_image(kept.value)
    assert (await found.of_image(kept.value.image)).id == second.id
    assert await found.remove(again) == [kept.value.image]
    assert await found.of_image(kept.value.image) is None and await found.all("ann") == []


@pytest.mark.slow
async def test_a_build_goes_on_after_its_server_was_killed(tmp_path):
    async with serving_plane(tmp_path, engine="local") as env:
        async with aiohttp.ClientSession(env["E2B_API_URL"], headers={"X-API-KEY": env["E2B_API_KEY"]}) as client:
            build = await request(client, "mine")
            waits = [{"type": "RUN", "args": ["sleep 5; echo built > /tmp/who"]}]
            assert await start(client, build, steps=waits) == 202
        env["process"].kill()
        await env["process"].wait()
    async with serving_plane(tmp_path, engine="local") as env:
        async with aiohttp.ClientSession(env["E2B_API_URL"], headers={"X-API-KEY": env["E2B_API_KEY"]}) as client:
            assert (await settled(client, build))["status"] == "ready"
