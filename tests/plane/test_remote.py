"""An engine that is another plane: two real servers, one behind the other."""

from contextlib import asynccontextmanager

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, PlaneNotFound, PlaneQuota, PlaneUnavailable, PlaneUnsupported
from rollyard.plane.engines.choose import engine
from tests.plane import served

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def federated(folder, monkeypatch):
    """Clients of a plane in front and of the one behind it, which has room for two."""
    behind, front = folder / "behind", folder / "front"
    behind.mkdir()
    front.mkdir()
    async with served.serving(behind, "--quota", "2") as there:
        monkeypatch.setenv("ROLLYARD_REMOTE_KEY", there["ROLLYARD_KEY"])
        remote = f"remote:{there['ROLLYARD_URL']}"
        async with served.serving(front, "--engine", remote) as here:
            async with (
                ry.plane.connect(here["ROLLYARD_URL"], here["ROLLYARD_KEY"]) as plane,
                ry.plane.connect(there["ROLLYARD_URL"], there["ROLLYARD_KEY"]) as other,
            ):
                name = f"remote:{there['ROLLYARD_URL'].removeprefix('http://')}"
                yield plane, other, name


async def test_an_instance_of_another_plane_is_used_and_deleted_through_this_one(tmp_path, monkeypatch):
    async with federated(tmp_path, monkeypatch) as (plane, other, name):
        assert (await plane.engines())[name]["exec"] is True
        made = await plane.instances.create(image="host", engine=name, environment={"WHO": "ann"}, ttl_s=300)
        (there,) = [one async for one in other.instances.list()]
        assert there["id"] != made["id"]
        done = await plane.instances.exec(made["id"], "echo $WHO; cat", stdin=b"\x00\xff")
        assert (done.exit_code, done.stdout) == (0, b"ann\n\x00\xff")
        await plane.instances.write(made["id"], "/tmp/a", b"\x01kept")
        assert await plane.instances.read(made["id"], "/tmp/a") == b"\x01kept"
        assert await other.instances.read(there["id"], "/tmp/a") == b"\x01kept"
        await plane.instances.delete(made["id"])
        with pytest.raises(PlaneNotFound):
            await other.instances.get(there["id"])
        assert (await other.usage())["used"] == (await plane.usage())["used"] == 0


@pytest.mark.slow
async def test_a_full_plane_is_known_before_a_create_is_sent(tmp_path, monkeypatch):
    async with federated(tmp_path, monkeypatch) as (plane, other, name):
        made = [(await plane.instances.create(image="host", engine=name))["id"] for _ in range(2)]
        with pytest.raises(PlaneQuota, match="is full"):
            await plane.instances.create(image="host", engine=name)
        assert len([one async for one in other.instances.list(live="any")]) == 2  # nothing was tried over there
        assert (await plane.usage())["used"] == 2
        for one in made:
            await plane.instances.delete(one)


async def test_a_plane_that_does_not_answer_is_named_and_nothing_is_counted(tmp_path, clock):
    gone = engine("remote:http://127.0.0.1:9", key="k")
    assert gone.name == "remote:127.0.0.1:9"
    with pytest.raises(PlaneUnavailable, match="127.0.0.1:9"):
        await gone.capacity()
    await gone.__aexit__(None, None, None)
    with pytest.raises(PlaneUnsupported, match="snapshot"):
        await (await gone.sandbox("i")).snapshot()
    with pytest.raises(ConfigError, match="wants a key"):
        engine("remote:http://127.0.0.1:9")
