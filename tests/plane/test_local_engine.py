"""Instances on the local engine over HTTP: pause, snapshot, fork, logs and what callers may not name."""

import asyncio

import pytest

import rollyard as ry
from rollyard.core.errors import (
    PlaneConflict,
    PlaneError,
    PlaneInvalid,
    PlaneNotFound,
    PlaneUnavailable,
    PlaneUnsupported,
)
from tests.plane.test_operations import process

pytestmark = pytest.mark.anyio


async def test_pause_snapshot_fork_and_logs(tmp_path):
    async with process(tmp_path, engine="local,noop") as (_, _, env):
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            start = ["sh", "-c", "echo began $0 $1; echo odd >&2; sleep 1000"]
            made = await plane.instances.create(
                image="host", start=start, arguments=["with", "these"], labels={"a": "b"}
            )
            one = made["id"]
            await plane.instances.write(one, "/tmp/kept", b"kept")
            paused = await plane.instances.pause(one)
            assert paused["state"] == "paused"
            with pytest.raises(PlaneConflict, match="resume"):
                await plane.instances.exec(one, "true")
            assert (await plane.instances.extend(one, 600))["state"] == "paused"
            assert (await plane.instances.resume(one))["state"] == "running"
            async with asyncio.timeout(60):
                while b"began" not in await plane.instances.logs(one):
                    await asyncio.sleep(0.1)
            assert await plane.instances.logs(one) == b"began with these\n"
            assert await plane.instances.logs(one, stream="stderr") == b"odd\n"
            forks = await plane.instances.fork(one, 2)
            assert [await plane.instances.read(fork["id"], "/tmp/kept") for fork in forks] == [b"kept", b"kept"]
            assert all(fork["labels"] == {"a": "b"} and fork["token"] for fork in forks)
            image = await plane.instances.snapshot(one)
            again = await plane.instances.create(image=image)
            assert await plane.instances.read(again["id"], "/tmp/kept") == b"kept"
            with pytest.raises(PlaneNotFound, match="no program"):
                await plane.instances.logs(again["id"])
            told = (await plane.instances.history(one))["history"]
            assert [line["state"] for line in told][:4] == ["creating", "running", "paused", "running"]
            noop = await plane.instances.create(image="host", engine="noop")
            for refused in (
                plane.instances.pause,
                plane.instances.fork,
                plane.instances.snapshot,
                plane.instances.logs,
            ):
                with pytest.raises((PlaneUnsupported, PlaneNotFound), match="local|no program"):
                    await refused(noop["id"])
            ids = [one, again["id"], noop["id"], *(fork["id"] for fork in forks)]
            assert set((await plane.instances.delete_many(ids=ids)).values()) == {"deleted"}
            assert (await plane.usage())["used"] == 0


@pytest.mark.adversarial
async def test_paths_of_the_server_are_not_images_nor_files_nor_mounts(tmp_path):
    """A caller's names stay names: nothing of the machine that the server runs on is opened by them."""
    async with process(tmp_path, engine="local") as (_, http, env):
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            for image in ("/", "/etc", "./x", "../x", "~root", str(tmp_path)):
                with pytest.raises(PlaneInvalid):
                    await plane.instances.create(image=image)
            with pytest.raises((PlaneInvalid, PlaneUnsupported, PlaneUnavailable)):
                await plane.instances.create(
                    image="host", mount_points=[{"local_dir": "/mnt", "remote_dir": str(tmp_path)}]
                )
            made = await plane.instances.create(image="host")
            one = made["id"]
            for path in ("relative", "", "../../etc/passwd", "\0"):
                with pytest.raises(PlaneInvalid):
                    await plane.instances.read(one, path)
            await plane.instances.exec(one, ["ln", "-s", str(tmp_path / "key"), "/tmp/link"])
            for path in (
                "/tmp/link",
                f"/proc/1/root{tmp_path}/key",
                f"/../../..{tmp_path}/key",
                f"/tmp/../..{tmp_path}/key",
            ):
                try:
                    data = await plane.instances.read(one, path)
                except PlaneError:
                    continue
                assert env["ROLLYARD_KEY"].encode() not in data
            async with http.get("/v1/envs/..%2f..%2fetc/passwd") as answer:
                assert answer.status == 404
            with pytest.raises(PlaneInvalid):
                await plane.envs.create("../x", "1")
            await plane.instances.delete(one)


async def test_a_server_on_redis_serves_the_same_and_a_page_without_runs(tmp_path, redis_server):
    where = f"redis://127.0.0.1:{redis_server}/0?prefix=served"
    async with process(tmp_path, "--store", where) as (_, http, env):
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            made = await plane.instances.create(image="host")
            chain = await plane.trace(made["id"])
            assert (chain["instance"]["id"], chain["rollout"]) == (made["id"], None)
            await plane.instances.delete(made["id"])
        async with http.get("/page/") as answer:
            assert (answer.status, answer.url.path) == (200, "/page/plane")
        async with http.get("/page/runs") as answer:
            assert answer.status == 404
