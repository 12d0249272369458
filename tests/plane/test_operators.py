"""A real day of a plane's operator, by the commands of docs/control-plane.md."""

import asyncio
import json
import os
import sys

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, PlaneUnauthorized
from rollyard.plane.storage.open import open_plane
from rollyard.store.copy import copy_store
from tests.plane.served import serving
from tests.plane.test_storage import record
from tests.plane.writers import instance

pytestmark = pytest.mark.anyio


async def rollyard(env, *words):
    command = [sys.executable, "-c", "from rollyard.cli.main import main; main()", *words]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **env}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.mark.slow
async def test_a_key_is_rotated_and_an_owners_terms_are_changed(tmp_path):
    async with serving(tmp_path, engine="noop") as env:
        where = {name: env[name] for name in ("ROLLYARD_URL", "ROLLYARD_KEY")}
        old = await rollyard(where, "plane", "new-key", "trainer", "ann", "--json")
        new = await rollyard(where, "plane", "new-key", "trainer", "ann", "--json")
        await rollyard(where, "plane", "revoke-key", old["id"], "--json")
        listed = {one["id"]: one for one in await rollyard(where, "plane", "keys", "--json")}
        assert listed[old["id"]]["revoked_at"] and not listed[new["id"]]["revoked_at"]
        assert "key" not in listed[new["id"]]
        async with ry.plane.connect(env["ROLLYARD_URL"], old["key"]) as plane:
            with pytest.raises(PlaneUnauthorized):
                await plane.usage()
        used = await rollyard(where, "plane", "owner", "ann", "--quota", "3", "--rate", "2.5", "--json")
        assert (used["quota"], used["rate"], used["used"]) == (3, 2.5, 0)
        async with ry.plane.connect(env["ROLLYARD_URL"], new["key"]) as plane:
            assert (await plane.usage())["limit"] == 3


async def test_a_plane_moves_from_sqlite_to_postgresql_and_back_without_losing_an_id(tmp_path, postgres_url):
    from rollyard.core.plane import AdmissionTerms

    first, again = str(tmp_path / "plane.db"), str(tmp_path / "again.db")
    async with open_plane(first) as (store, runs):
        made = [await store.begin(instance("ann"), terms=AdmissionTerms(), request=("c", str(n), b"d")) for n in "123"]
        await store.end(made[0][0].id, "deleted", at=9.0, reason="why")
        await store.put_records([record("a", due_at=5.0)])
        await store.put_blob("d" * 64, b"\x00\xff", owner="ann", at=1.0)
        await runs.create_run({"a": 1}, id="run1")
        before = await seen(store, [one.id for one, _ in made])
    counts = await copy_store(first, postgres_url)
    assert counts["plane_instances"] == 3 and counts["plane_records"] == 1 and counts["runs"] == 1
    async with open_plane(postgres_url) as (store, runs):
        assert await seen(store, [one.id for one, _ in made]) == before
        assert (await runs.get_run("run1")).config == {"a": 1}
        same, new = await store.begin(instance("ann"), terms=AdmissionTerms(), request=("c", "2", b"d"))
        assert same.id == made[1][0].id and not new, "a request is remembered"
        await store.end(made[1][0].id, "deleted", at=10.0, reason="later")  # its history goes on
        assert [one.reason for one in await store.history(made[1][0].id)][-1] == "later"
        moved = await seen(store, [one.id for one, _ in made])
    await copy_store(postgres_url, again)
    async with open_plane(again) as (store, _):
        assert await seen(store, [one.id for one, _ in made]) == moved
    with pytest.raises(ConfigError, match="not empty"):
        await copy_store(first, again)


async def seen(store, ids):
    rows = [(await store.get_instance(one), await store.history(one)) for one in ids]
    return (
        rows,
        await store.usage("ann"),
        await store.get_record("fleet_session", "job_1", "a"),
        await store.get_blob("d" * 64),
    )
