"""A real day of a plane's operator, by the commands of docs/running-a-plane.md."""

import asyncio
import json
import re
import shlex
from functools import partial
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from typer.testing import CliRunner

import rollyard as ry
from rollyard.cli.main import app
from rollyard.core.errors import ConfigError, PlaneNotFound, PlaneUnauthorized
from rollyard.plane.storage.open import open_plane
from rollyard.store.copy import copy_store
from tests.plane.served import serving
from tests.plane.test_storage import record
from tests.plane.writers import instance

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]


async def rollyard(env, *words):
    """The verb in a thread of its own: it brings its own loop."""
    done = await asyncio.get_running_loop().run_in_executor(None, partial(CliRunner().invoke, app, words, env=env))
    assert done.exit_code == 0, done.output
    return done.stdout


async def test_what_the_page_for_operators_says_is_done(tmp_path):
    """docs/running-a-plane.md, command by command, against a served plane."""
    page = (ROOT / "docs" / "running-a-plane.md").read_text()
    blocks = dict(re.findall(r"```sh (\w+)\n(.*?)```", page, re.S))
    async with serving(tmp_path, engine="noop", environ={"HOME": str(tmp_path)}) as env:
        where = {**env, "HOME": str(tmp_path)}
        del where["process"]
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            made = await plane.instances.create(image="host", owner="ann")
            first = json.loads(await rollyard(where, "plane", "new-key", "owner", "ann", "--json"))
            known = {"INSTANCE": made["id"], "KEY_ID": first["id"], "plane.db": str(tmp_path / "p.db")}
            known["plane-copy.db"] = str(tmp_path / "copy.db")
            printed = {}
            for name in ("operate", "rotate", "secret", "backup"):
                for line in blocks[name].splitlines():
                    words = [known.get(word, word) for word in shlex.split(line, comments=True)]
                    if name == "secret":
                        words += ["--signing-file", str(tmp_path / "secret")]
                    printed[words[2] if name != "operate" else shlex.join(words[2:4])] = await rollyard(
                        where, *words[1:]
                    )
            assert (tmp_path / "copy.db").exists()
            assert "rollyard plane ready at" in (tmp_path / "stderr").read_text()
            assert printed["owner ann"].strip() == "ann: 1 instances, limit 200, rate 5.0"
            assert made["id"] in printed["instances --owner"] and "running" in printed[f"events {made['id']}"]
            assert (await plane.usage(owner="ann"))["limit"] == 200
        metrics = printed["new-key metrics"].split()[-1]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {metrics}"}) as http:
            told = {}
            for path in ("/metrics", "/v1/engines", "/v1/instances", "/v1/keys", f"/v1/instances/{made['id']}/data/x"):
                async with http.get(env["ROLLYARD_URL"] + path) as answer:
                    told[path] = answer.status
        assert told.pop("/metrics") == 200 and set(told.values()) == {403}
        async with ry.plane.connect(env["ROLLYARD_URL"], first["key"]) as plane:
            with pytest.raises(PlaneUnauthorized):
                await plane.usage()


@pytest.mark.slow
async def test_a_dump_of_a_served_plane_on_postgresql_serves_again_with_every_id(
    tmp_path, postgres_server, postgres_url
):
    """By the commands of the page, while the plane goes on; what was made after the dump is not in it."""
    page = (ROOT / "docs" / "running-a-plane.md").read_text()
    (block,) = re.findall(r"```sh postgres\n(.*?)```", page, re.S)
    again, engine = f"{postgres_url}_again", {"engine": "noop", "environ": {"HOME": str(tmp_path)}}
    known = {
        "postgresql://plane@db.example/plane": postgres_url,
        "postgresql://plane@db.example/postgres": f"{postgres_server}/postgres",
        "postgresql://plane@db.example/plane_again": again,
        "plane_again": again.rpartition("/")[2],
        "plane.dump": str(tmp_path / "plane.dump"),
    }
    async with serving(tmp_path, "--store", postgres_url, **engine) as env:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            await plane.envs.create("weather", "1", owner="ann", env={"CITY": "Oslo"})
            made = await plane.instances.create(env="weather@1", owner="ann", ttl_s=3600)
            anns = await plane.create_key("owner", "ann")
            for line in block.splitlines():
                words = [known.get(word, word) for word in shlex.split(line)]
                ran = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
                assert await ran.wait() == 0, (words[0], await ran.stderr.read())
            later = await plane.instances.create(env="weather@1", owner="ann", ttl_s=3600)
    try:
        async with serving(tmp_path, "--store", again, **engine) as env:
            async with ry.plane.connect(env["ROLLYARD_URL"], anns["key"]) as ann:
                assert [one["id"] async for one in ann.instances.list()] == [made["id"]]
                assert (await ann.usage())["used"] == 1
                assert (await ann.envs.get("weather", "1"))["spec"]["env"] == {"CITY": "Oslo"}
                with pytest.raises(PlaneNotFound):
                    await ann.instances.get(later["id"])
                await ann.instances.delete(made["id"])
                assert (await ann.usage())["used"] == 0
    finally:
        admin = await asyncpg.connect(f"{postgres_server}/postgres")
        await admin.execute(f"DROP DATABASE IF EXISTS {known['plane_again']} WITH (FORCE)")
        await admin.close()


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
