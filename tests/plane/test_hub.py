"""The hub: versions, compare-and-swap, release, search, pages."""

import asyncio

import pytest

from rollyard.core.errors import PlaneConflict, PlaneInvalid, PlaneNotFound
from rollyard.core.plane import EnvSpec
from rollyard.plane.storage.open import open_plane
from tests.plane.conftest import ADMIN, OWNER

pytestmark = pytest.mark.anyio


async def test_an_environment_is_made_read_changed_and_deleted(plane):
    made = await plane.hub.create("weather", "1.0", EnvSpec(description="asks the sky", image="python"), by=OWNER)
    assert (made.revision, made.status, made.id) == (1, "draft", "weather@1.0")
    assert await plane.hub.get("weather", "1.0") == made
    with pytest.raises(PlaneConflict, match="exists"):
        await plane.hub.create("weather", "1.0", EnvSpec(), by=OWNER)
    plane.clock.now += 5
    changed = await plane.hub.update("weather", "1.0", EnvSpec(image="node"), revision=1, by=OWNER)
    assert (changed.revision, changed.spec.image) == (2, "node")
    assert (changed.created_at, changed.updated_at) == (made.created_at, made.created_at + 5)
    await plane.hub.delete("weather", "1.0", by=OWNER)
    assert not await plane.hub.exists("weather", "1.0")
    with pytest.raises(PlaneNotFound):
        await plane.hub.delete("weather", "1.0", by=OWNER)


async def test_a_released_version_never_changes(plane):
    await plane.hub.create("e", "1", EnvSpec(), by=OWNER)
    released = await plane.hub.release("e", "1", revision=1, by=OWNER)
    assert released.released_at == plane.clock.now
    for change in (
        plane.hub.update("e", "1", EnvSpec(image="x"), revision=released.revision, by=OWNER),
        plane.hub.release("e", "1", by=OWNER),
        plane.hub.delete("e", "1", by=OWNER),
    ):
        with pytest.raises(PlaneConflict, match="released"):
            await change
    assert await plane.hub.get("e", "1") == released
    await plane.hub.delete("e", "1", by=ADMIN)


async def test_an_update_from_an_old_revision_changes_nothing(plane):
    await plane.hub.create("e", "1", EnvSpec(), by=OWNER)
    await plane.hub.update("e", "1", EnvSpec(description="first"), revision=1, by=OWNER)
    with pytest.raises(PlaneConflict, match="revision 2"):
        await plane.hub.update("e", "1", EnvSpec(description="second"), revision=1, by=OWNER)
    assert (await plane.hub.get("e", "1")).spec.description == "first"


async def test_32_writers_on_two_connections_lose_no_update(plane, plane_url):
    """P1: each adds its own tag until its compare-and-swap holds."""
    await plane.hub.create("e", "1", EnvSpec(), by=OWNER)

    async def add(store, tag):
        while True:
            seen = await store.get_env("e", "1")
            spec = EnvSpec(tags=(*seen.spec.tags, tag))
            try:
                await store.update_env("e", "1", spec, revision=seen.revision, at=1.0)
                return
            except PlaneConflict:
                await asyncio.sleep(0.001)

    async with open_plane(plane_url) as (other, _):
        await asyncio.gather(*(add((plane.store, other)[n % 2], f"t{n}") for n in range(32)))
    found = await plane.hub.get("e", "1")
    assert set(found.spec.tags) == {f"t{n}" for n in range(32)}
    assert found.revision == 33


async def test_pages_are_whole_and_search_looks_into_descriptions_and_tags(plane):
    for n in range(7):
        await plane.hub.create(
            f"e{n}", "1", EnvSpec(description=f"number {n} of 100%", tags=("Odd",) if n % 2 else ()), by=OWNER
        )
    seen, cursor = [], None
    while True:
        found, cursor = await plane.hub.page(cursor=cursor, limit=3)
        seen += [record.name for record in found]
        if cursor is None:
            break
    assert seen == [f"e{n}" for n in range(7)]
    assert [r.name for r in (await plane.hub.page(search="odd NUMBER"))[0]] == ["e1", "e3", "e5"]
    assert [r.name for r in (await plane.hub.page(search="5 100%"))[0]] == ["e5"]
    assert (await plane.hub.page(search="%_%"))[0] == []
    with pytest.raises(PlaneInvalid, match="cursor"):
        await plane.hub.page(cursor="nonsense")


async def test_names_and_digests_are_checked(plane):
    for name in ("", "a/b", "../x", "a@b", "x" * 101):
        with pytest.raises(PlaneInvalid):
            await plane.hub.create(name, "1", EnvSpec(), by=OWNER)
    with pytest.raises(PlaneInvalid, match="sha256"):
        await plane.hub.create("e", "1", EnvSpec(artifacts={"bundle": "abc"}), by=OWNER)
