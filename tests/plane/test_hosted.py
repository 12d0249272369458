"""Engines behind HTTP services: Arca (a loopback stand-in written from its contract) and AEnvironment's standard contract."""

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from rollyard.core.errors import (
    ConfigError,
    PlaneInvalid,
    PlaneUnavailable,
    PlaneUnsupported,
    SandboxGone,
)
from rollyard.core.plane import AdmissionTerms
from rollyard.core.sandbox import Mount, Resources
from rollyard.plane.engines.choose import engine
from rollyard.plane.service.instances import CreateInstance
from rollyard.plane.storage.sql import SqlPlane
from rollyard.store import Store
from rollyard.testing.serve import serve_app
from tests.plane.arca_server import KEY, ArcaStandIn
from tests.plane.standard_server import StandardService

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def planed(tmp_path, assemble, clock, made, **settings):
    async with made, Store.open(tmp_path / "p.db") as store:
        yield await assemble(SqlPlane(store.database), {made.name: made}, clock, **settings)


def asked(**changes):
    return CreateInstance(**{"image": "tpl-1", "network": "host", "ttl_s": 90.0, **changes})


async def test_arca_makes_shows_signs_and_deletes(tmp_path, assemble, clock):
    arca = ArcaStandIn()
    async with serve_app(arca.app()) as url:
        made = engine(f"arca={url}/", key=KEY, look_s=0.01)
        async with planed(tmp_path, assemble, clock, made) as plane:
            mounts = (Mount(id="OSS_x", remote_dir="/data", local_dir="/workspace"),)
            one = await plane.instances.create(asked(environment={"A": "b"}, mount_points=mounts), owner="ann")
            assert one.state == "running" and one.ref == "sb-1"
            (body,) = arca.asked
            assert body["metadata"]["aenv_owner"] == "ann" and body["metadata"]["rollyard_instance"] == one.id
            assert {name: body[name] for name in ("template_id", "ttl_in_minutes", "envs", "mount_points")} == {
                "template_id": "tpl-1",
                "ttl_in_minutes": 2,  # rounded up
                "envs": {"A": "b"},
                "mount_points": [{"id": "OSS_x", "remote_dir": "/data", "local_dir": "/workspace"}],
            }
            signed, ends = await plane.gateway.presign(one.id, 18080, 0.5, base_url="http://plane")
            assert arca.tokens["t0"] == ("sb-1", 18080, 0.5) and ends == clock.now + 30
            async with aiohttp.request("GET", signed) as reply:
                assert await reply.text() == "port 18080 of sb-1"
            await plane.instances.delete(one.id)
            assert not arca.sandboxes and (await plane.store.usage("ann")).used == 0
            assert not await made.alive("sb-1")


async def test_what_arca_cannot_do_is_refused_by_name_and_costs_no_quota(tmp_path, assemble, clock):
    arca = ArcaStandIn(pending=0)
    async with serve_app(arca.app()) as url:
        async with planed(
            tmp_path, assemble, clock, engine(f"arca={url}", key=KEY), terms=AdmissionTerms(quota=1)
        ) as plane:
            instances = plane.instances
            for refused in (
                asked(network="none"),
                asked(arguments=("-v",), start=("sh",)),
                asked(resources=Resources(gpus=1)),
                asked(resources=Resources(cpus=2)),
            ):
                with pytest.raises(PlaneUnsupported, match="arca"):
                    await instances.create(refused, owner="ann")
            with pytest.raises(PlaneInvalid, match="template"):
                await instances.create(asked(image="host"), owner="ann")
            assert not arca.asked
            one = await instances.create(asked(), owner="ann")  # the quota of one is still free
            for call in (instances.sandbox(one.id), instances.extend(one.id, 60)):
                with pytest.raises(PlaneUnsupported, match="arca"):
                    await call
            with pytest.raises(PlaneUnsupported, match="presign"):
                async with plane.gateway.dial(one.id, 8081):
                    pass
            with pytest.raises(PlaneUnsupported):
                await instances.engines["arca"].list("test-plane")


async def test_the_sweep_ends_what_arca_made_though_it_cannot_list(tmp_path, assemble, clock):
    arca = ArcaStandIn(pending=0)
    async with serve_app(arca.app()) as url:
        async with planed(tmp_path, assemble, clock, engine(f"arca={url}", key=KEY)) as plane:
            await plane.instances.create(asked(), owner="ann")
            clock.now += 91
            swept = await plane.sweeper.once()
            assert (swept.ended, swept.failures, arca.sandboxes) == (1, 0, {})
            assert (await plane.store.usage("ann")).used == 0


async def test_an_arca_sandbox_that_does_not_come_up_is_removed(tmp_path, assemble, clock):
    arca = ArcaStandIn(status="FAILED", pending=0)
    async with serve_app(arca.app()) as url:
        async with planed(tmp_path, assemble, clock, engine(f"arca={url}", key=KEY)) as plane:
            with pytest.raises(PlaneUnavailable, match="FAILED"):
                await plane.instances.create(asked(), owner="ann")
            assert not arca.sandboxes


async def test_a_wrong_key_is_an_error_without_the_key_in_it():
    async with serve_app(ArcaStandIn().app()) as url:
        async with engine(f"arca={url}", key="wrong-key-text") as made:
            with pytest.raises(PlaneUnavailable) as caught:
                await made.delete("sb-1")
            assert "wrong-key-text" not in str(caught.value) and "bad key" in str(caught.value)


def test_an_engine_without_its_key_or_url_says_what_to_set(monkeypatch):
    monkeypatch.delenv("ARCA_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="ARCA_API_KEY"):
        engine("arca=http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="--engine standard="):
        engine("standard")


async def test_a_standard_service_is_an_engine_with_gateway_and_list(tmp_path, assemble, clock):
    service = StandardService()
    async with serve_app(service.app()) as url:
        made = engine(f"standard={url}", look_s=0.01)
        async with planed(tmp_path, assemble, clock, made) as plane:
            one = await plane.instances.create(
                asked(image="repo/x:1", resources=Resources(cpus=2, memory_mb=512), labels={"team": "a"}), owner="ann"
            )
            (body,) = service.asked
            assert body["artifacts"] == [{"type": "image", "content": "repo/x:1"}]
            deploy = body["deploy_config"]
            assert (deploy["cpu"], deploy["memory"], deploy["ttl"], deploy["owner"]) == ("2", "512Mi", "90000ms", "ann")
            (listed,) = await made.list("test-plane")
            assert (listed.ref, listed.instance_id) == (one.ref, one.id)
            assert await made.list("another-plane") == []
            async with plane.gateway.dial(one.id, urlsplit(url).port) as stream:
                await stream.send(b"GET /inside HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                got = b""
                async with asyncio.timeout(20):
                    while part := await stream.receive():
                        got += part
                assert got.startswith(b"HTTP/1.1 200") and got.endswith(b"inside")
            service.instances["stray"] = {"id": "stray", "labels": {**deploy["labels"], "rollyard.instance": "inst_x"}}
            assert (await plane.sweeper.once()).strays == 1
            await plane.instances.delete(one.id)
            assert not service.instances


async def test_a_list_without_labels_is_not_believed(tmp_path, assemble, clock):
    service = StandardService(labels=False)
    async with serve_app(service.app()) as url:
        async with planed(tmp_path, assemble, clock, engine(f"standard={url}", look_s=0.01)) as plane:
            await plane.instances.create(asked(), owner="ann")
            assert (await plane.sweeper.once()).strays == 0
            assert len(service.instances) == 1


@pytest.mark.parametrize(
    "status, body", [(200, b"<html>"), (200, b"[]"), (502, b""), (302, b""), (200, b'{"success": 1}')]
)
async def test_odd_answers_of_a_service_are_typed_errors(status, body):
    async def odd(request):
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", odd)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        async with engine(f"standard=http://127.0.0.1:{port}") as made:
            with pytest.raises(PlaneUnavailable):
                await made.alive("box-1")
    finally:
        await runner.cleanup()


async def test_a_service_that_is_not_there_is_unavailable_and_a_missing_instance_is_not_alive():
    async with engine("standard=http://127.0.0.1:9") as made:
        with pytest.raises(PlaneUnavailable):
            await made.alive("x")
    async with serve_app(StandardService().app()) as url, engine(f"standard={url}") as made:
        assert not await made.alive("x")
        await made.delete("x")
        with pytest.raises(SandboxGone, match="no instance x"):
            await made.dial("x", 80)
