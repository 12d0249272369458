"""`rollyard serve plane` as people start it: a process, the local engine, the client, a restart."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web

import rollyard as ry
from rollyard.core.errors import (
    PlaneConflict,
    PlaneForbidden,
    PlaneNotFound,
    PlaneQuota,
    PlaneUnauthorized,
    PlaneUnavailable,
    PlaneUnsupported,
)
from tests.plane import served

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving(folder):
    """The client of the server's admin, and where the server is."""
    async with served.serving(folder, "--quota", "3") as env:
        said = (folder / "stderr").read_text()
        assert "rollyard plane ready at http://127.0.0.1:" in said and env["ROLLYARD_KEY"] not in said
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            yield plane, env["ROLLYARD_URL"]


async def test_a_local_instance_runs_programs_keeps_files_and_outlives_the_server(tmp_path):
    async with serving(tmp_path) as (plane, url):
        assert set(await plane.engines()) == {"local", "noop"}
        await plane.envs.create("e", "1", description="a host", image="host", env={"WHO": "ann"})
        made = await plane.instances.create(env="e@1", ttl_s=300)
        done = await plane.instances.exec(made["id"], "echo $WHO; cat", stdin=b"\x00\xff")
        assert (done.exit_code, done.stdout) == (0, b"ann\n\x00\xff")
        await plane.instances.write(made["id"], "/tmp/a", b"\x01kept")
    async with serving(tmp_path) as (plane, url):
        assert await plane.instances.read(made["id"], "/tmp/a") == b"\x01kept"
        assert (await plane.instances.get(made["id"]))["created_at"] == made["created_at"]
        await plane.instances.delete(made["id"])
        with pytest.raises(PlaneNotFound):
            await plane.instances.get(made["id"])
        assert (await plane.usage())["used"] == 0


async def test_refusals_come_back_as_typed_errors_and_the_page_is_there(tmp_path):
    async with serving(tmp_path) as (plane, url):
        made = [(await plane.instances.create(image="host", engine="noop", run_id="r"))["id"] for _ in range(3)]
        assert [one["id"] async for one in plane.instances.list(run_id="r")] == made
        with pytest.raises(PlaneQuota):
            await plane.instances.create(image="host", engine="noop")
        with pytest.raises(PlaneUnsupported, match="local"):
            await plane.instances.exec(made[0], "true")
        await plane.envs.create("e", "1")
        with pytest.raises(PlaneConflict):
            await plane.envs.update("e", "1", revision=7, image="x")
        key = (await plane.create_key("agent", "ann"))["key"]
        async with ry.plane.connect(url, key) as agent:
            with pytest.raises(PlaneForbidden):
                await agent.instances.create(image="host")
        async with ry.plane.connect(url, "wrong") as nobody:
            with pytest.raises(PlaneUnauthorized):
                await nobody.engines()
        assert b"<html" in await plane.bytes("GET", "/page/")
        assert b"noop" in await plane.bytes("GET", "/page/plane")
        assert b"/page/plane/hub" in await plane.bytes("GET", "/page/plane/instances")
        assert set((await plane.instances.delete_many(run_id="r")).values()) == {"deleted"}


@pytest.mark.parametrize(
    "status, body",
    [(200, b"<html>"), (200, b"[1]"), (200, b""), (502, b"<html>bad gateway"), (404, b'{"detail": 1}'), (302, b"")],
)
async def test_odd_answers_are_typed_errors(status, body):
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
        async with ry.plane.connect(f"http://127.0.0.1:{port}", "k") as plane:
            with pytest.raises(PlaneUnavailable):
                await plane.instances.get("inst_x")
    finally:
        await runner.cleanup()


async def test_a_server_that_is_not_there_is_a_typed_error():
    async with ry.plane.connect("http://127.0.0.1:9", "k") as plane:
        with pytest.raises(PlaneUnavailable):
            await plane.engines()
