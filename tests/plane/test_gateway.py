"""The gateway and signed URLs, to a real server in a real sandbox (P6, P7)."""

import hashlib
import json
import os
from pathlib import Path

import aiohttp
import pytest

import rollyard as ry
from rollyard.core.errors import PlaneNotFound, PlaneUnavailable, PlaneUnsupported
from rollyard.net.forward import ForwardLimits
from rollyard.plane.engines.choose import engine
from rollyard.plane.engines.noop import NoopEngine
from rollyard.plane.service.access import NewKey
from rollyard.plane.storage.sql import SqlPlane
from rollyard.store import Store
from rollyard.testing.serve import serve_app

pytestmark = pytest.mark.anyio
INSIDE = Path(__file__).with_name("inside.py")
PORT = 8081
START = ["sh", "-c", 'while ! test -s "$0"; do sleep 0.05; done; exec python3 "$0" "$1"']


@pytest.fixture
async def world(tmp_path, clock, assemble):
    """A plane with the local engine, an owner's client, and an instance whose own server answers."""
    async with Store.open(tmp_path / "p.db") as store, engine("local") as local:
        plane = await assemble(SqlPlane(store.database), {"local": local, "noop": NoopEngine(clock=clock)}, clock)
        plane.gateway.limits = ForwardLimits(max_body=2**20, beat_s=0.2)
        _, key = await plane.access.issue(NewKey(role="owner", owner="ann"))
        async with serve_app(plane.app) as url, ry.plane.connect(url, key) as client:
            made = await client.instances.create(image="host", start=START, arguments=["/tmp/inside.py", str(PORT)])
            try:
                await client.instances.write(made["id"], "/tmp/inside.py", INSIDE.read_bytes())
                await client.instances.wait(made["id"], PORT, "/ready")
                plane.client, plane.made, plane.url = client, made, url
                async with aiohttp.ClientSession() as plane.http:
                    yield plane
            finally:
                await client.instances.delete(made["id"])


def own(world):
    return {"Authorization": f"Bearer {world.made['token']}"}


def at(world, rest):
    return f"{world.url}/v1/instances/{world.made['id']}{rest}"


async def test_a_request_passes_both_ways_whole_and_the_callers_key_does_not(world):
    body = os.urandom(700_000)
    cookies = {"Cookie": "theirs=1", "X-Forwarded-For": "1.2.3.4", "Connection": "keep-alive, X-Hop", "X-Hop": "1"}
    async with world.http.put(at(world, "/data/a%2Fb/c?q=%20x&r"), data=body, headers=own(world) | cookies) as answer:
        said = await answer.json()
    assert (answer.status, said["method"], said["target"]) == (200, "PUT", "/a%2Fb/c?q=%20x&r")
    assert (said["size"], said["sha256"]) == (len(body), hashlib.sha256(body).hexdigest())
    assert said["headers"]["host"] == f"127.0.0.1:{PORT}" and said["headers"]["cookie"] == "theirs=1"
    assert {"authorization", "x-forwarded-for", "x-hop"}.isdisjoint(said["headers"])
    assert world.made["token"] not in json.dumps(said)

    async def parts():
        for n in range(5):
            yield b"%d" % n * 1000

    async with world.http.post(at(world, f"/port/{PORT}/"), data=parts(), headers=own(world)) as answer:
        assert (await answer.json())["size"] == 5000
    async with world.http.head(at(world, "/data/x"), headers=own(world)) as answer:
        assert answer.status == 200 and await answer.read() == b""
    async with world.http.get(at(world, "/data/until-the-end"), headers=own(world)) as answer:
        assert await answer.read() == b"whole"
    async with world.http.get(at(world, "/data/noise"), headers=own(world)) as answer:
        assert answer.status == 502


async def test_event_streams_come_as_they_are_made_and_silence_is_broken_by_comments(world):
    async with world.http.get(at(world, "/data/events?pause=1"), headers=own(world)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        first = await answer.content.readuntil(b"\n\n")
        rest = await answer.content.read()
    assert first == b"data: 0\n\n"
    assert [line for line in rest.split(b"\n\n") if line.startswith(b"data")] == [b"data: 1", b"data: 2"]
    assert b": \n\n" in rest


async def test_websockets_pass_with_their_subprotocol_and_end_code(world):
    url = await world.client.instances.presign(world.made["id"], PORT)
    for where, headers in ((url + "socket", {}), (at(world, "/data/socket"), own(world))):
        async with world.http.ws_connect(where, headers=headers, protocols=("other", "chat")) as ws:
            assert ws.protocol == "chat"
            await ws.send_str("häh")
            assert await ws.receive_str(timeout=30) == "häh"[::-1]
            await ws.send_bytes(b"\x00\x01" * 50_000)
            assert await ws.receive_bytes(timeout=30) == b"\x01\x00" * 50_000
            await ws.send_str("end")
            assert (await ws.receive(timeout=30)).type is aiohttp.WSMsgType.CLOSE
            assert ws.close_code == 4001
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await world.http.ws_connect(at(world, "/data/socket"))
    assert refused.value.status == 401
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await world.http.ws_connect(url + "away")


async def test_a_body_over_the_limit_is_refused_not_cut(world):
    async def parts():
        for _ in range(40):
            yield b"x" * 2**16

    for data in (b"x" * (2**20 + 1), parts()):
        try:
            async with world.http.post(at(world, "/data/"), data=data, headers=own(world)) as answer:
                assert answer.status == 413 and (await answer.json())["error"]["code"] == "too_large"
        except aiohttp.ClientConnectionError:
            pass  # the server had said 413 and hung up while the client was still sending
    async with world.http.post(at(world, "/data/"), data=b"x" * 2**20, headers=own(world)) as answer:
        assert (await answer.json())["size"] == 2**20


async def test_an_answer_that_breaks_off_is_not_taken_for_whole(world):
    with pytest.raises(aiohttp.ClientPayloadError):
        async with world.http.get(at(world, "/data/broken"), headers=own(world)) as answer:
            await answer.read()


@pytest.mark.adversarial
async def test_targets_that_callers_name_are_ignored(world):
    """Headers and queries by which other gateways are told where to go."""
    async with serve_app(tempting := Tempting()) as elsewhere:
        names = ("AEnvCore-MCPProxy-URL", "X-Forwarded-Host", "X-Sandbox-Pod-Ip", "Host", "X-Original-URL", "Forwarded")
        for name in names:
            headers = own(world) | {name: elsewhere.removeprefix("http://") if name == "Host" else elsewhere}
            async with world.http.get(
                at(world, f"/data/x?url={elsewhere}&target={elsewhere}"), headers=headers
            ) as answer:
                assert answer.status == 200 and (await answer.json())["target"].startswith("/x?url=")
        for path in (f"/port/{elsewhere}/", "/port/0/", "/port/65536/", "/port/8081@evil/", "/port/-1/"):
            async with world.http.get(at(world, path), headers=own(world)) as answer:
                assert answer.status in (400, 404), path
    assert tempting.asked == 0


class Tempting:
    def __init__(self):
        self.asked = 0

    async def __call__(self, scope, receive, send):
        self.asked += 1


@pytest.mark.adversarial
async def test_a_token_opens_its_own_instance_only_and_only_the_gateway(world):
    other = await world.client.instances.create(image="host")
    bob = (await world.access.issue(NewKey(role="owner", owner="bob")))[1]
    try:
        token: str = world.made["token"]
        changed = token[:-1] + ("B" if token.endswith("A") else "A")
        for text, status in (("wrong", 401), (bob, 404), (other["token"], 404), (changed, 404)):
            async with world.http.get(at(world, "/data/"), headers={"Authorization": f"Bearer {text}"}) as answer:
                assert answer.status == status
        async with world.http.get(at(world, "/data/")) as answer:
            assert answer.status == 401
        async with world.http.get(at(world, ""), headers=own(world)) as answer:
            assert answer.status == 401
    finally:
        await world.client.instances.delete(other["id"])
    async with world.http.get(f"{world.url}/v1/instances/{other['id']}/data/", headers=own(world)) as answer:
        assert answer.status == 404


@pytest.mark.adversarial
async def test_a_signed_url_is_for_one_port_and_one_time_and_cannot_be_changed(world):
    url = await world.client.instances.presign(world.made["id"], PORT, minutes=0.5)
    async with world.http.get(url + "x?y=1") as answer:
        said = await answer.json()
        assert said["target"] == "/x?y=1"
        assert said["headers"]["x-forwarded-prefix"] == url.removeprefix(world.url).rstrip("/")
        assert answer.headers["content-security-policy"].startswith("sandbox ")
        assert "evil" not in answer.headers["set-cookie"] and "Path=/at/" in answer.headers["set-cookie"]
    async with world.http.get(url + "away", allow_redirects=False) as answer:
        assert answer.headers["location"] == url.removeprefix(world.url) + "elsewhere"
    signed = url.rstrip("/").rsplit("/", 1)[1]
    instance_id, port, ends, proof = signed.split(".")
    later = str(int(ends) + 10**9)
    for changed in (
        f"{instance_id}.{int(port) + 1}.{ends}.{proof}",
        f"{instance_id}.{port}.{later}.{proof}",
        f"{instance_id}x.{port}.{ends}.{proof}",
        f"{instance_id}.{port}.{ends}.{proof[:-2]}",
        f"{instance_id}.{port}.{ends}",
        f"{instance_id}.{port}.{ends}.",
        world.made["token"].removeprefix("ryi-"),
        "é",
    ):
        async with world.http.get(f"{world.url}/at/{changed}/x") as answer:
            assert answer.status == 401, changed
    world.clock.now += 29
    async with world.http.get(url) as answer:
        assert answer.status == 200
    world.clock.now += 2
    async with world.http.get(url) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (410, "gone")


async def test_a_port_that_nobody_listens_on_is_502_and_waiting_for_it_ends(world):
    url = await world.client.instances.presign(world.made["id"], 9)
    async with world.http.get(url) as answer:
        assert answer.status == 502
    with pytest.raises(PlaneUnavailable, match="status 502"):
        await world.client.instances.wait(world.made["id"], 9, within_s=1.0)


async def test_traffic_is_a_sign_of_life(world):
    before = await world.instances.record(world.made["id"])
    world.clock.now += 100
    async with world.http.get(at(world, "/data/"), headers=own(world)):
        pass
    assert (await world.instances.record(world.made["id"])).last_seen_at >= before.last_seen_at + 100


async def test_an_engine_without_a_way_in_says_501_and_what_else_there_is(world, clock, assemble):
    made = await world.client.instances.create(image="host", engine="noop")
    for path in ("/data/x", "/mcp", "/port/80/"):
        async with world.http.get(f"{world.url}/v1/instances/{made['id']}{path}", headers=own_of(made)) as answer:
            said = (await answer.json())["error"]
            assert (answer.status, said["code"]) == (501, "engine_cannot") and "local" in said["hint"]
    with pytest.raises(PlaneUnsupported, match="local"):
        await world.client.instances.presign(made["id"], 80)

    class Signs(NoopEngine):
        """Cannot be dialled, and gives URLs of its own."""

        name = "signs"
        capabilities = NoopEngine().capabilities.__class__(list=True, presign=True, images=True, network_none=True)

        async def presign(self, ref, port, minutes):
            return f"https://signs.example/{ref}/{port}/{minutes}"

    plane = await assemble(world.store, {"signs": Signs(clock=clock)}, clock)
    made = await world.access.issue(NewKey(role="owner", owner="ann"))
    async with serve_app(plane.app) as url, ry.plane.connect(url, made[1]) as client:
        there = await client.instances.create(image="host")
        assert (await client.instances.presign(there["id"], 7, minutes=0.5)).endswith("/7/0.5")
        async with world.http.get(f"{url}/v1/instances/{there['id']}/mcp", headers=own_of(there)) as answer:
            assert answer.status == 501 and "presign" in (await answer.json())["error"]["hint"]


def own_of(made):
    return {"Authorization": f"Bearer {made['token']}"}


async def test_the_gateway_of_an_instance_that_is_gone_is_closed(world):
    url = await world.client.instances.presign(world.made["id"], PORT)
    other = await world.client.instances.create(image="host")
    await world.client.instances.delete(other["id"])
    async with world.http.get(f"{world.url}/v1/instances/{other['id']}/data/", headers=own_of(other)) as answer:
        assert answer.status == 410
    with pytest.raises(PlaneNotFound):
        await world.client.instances.presign("inst_none", PORT)
    assert url
