"""What another owner, or somebody without a key, must not be able to do to what is yours on a shared plane."""

import base64
import hashlib
import sqlite3
import stat
import subprocess
import sys

import aiohttp
import httpx
import pytest

import rollyard as ry
from rollyard.core.errors import PlaneForbidden, PlaneInvalid, PlaneNotFound, PlaneUnauthorized
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.plane.api.app import plane_app
from rollyard.plane.parts import assemble
from rollyard.plane.service.access import NewKey
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.signing import Signer
from rollyard.plane.storage.sql import SqlPlane
from rollyard.testing.serve import serve_app
from tests.plane.served import serving

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]
SECRET = "sk-of-ann-0123456789"


@pytest.fixture
async def shared(plane):
    """A plane with ann, bob, an agent of ann's and an admin, each with a client of their own."""
    async with serve_app(plane_app(plane)) as url:
        clients = {}
        people = [
            ("ann", "owner", "ann"),
            ("bob", "owner", "bob"),
            ("agent", "agent", "ann"),
            ("admin", "admin", "admin"),
        ]
        for name, role, owner in people:
            _, key = await plane.access.issue(NewKey(role=role, owner=owner))
            clients[name] = await ry.plane.connect(url, key).__aenter__()
        yield clients
        for client in clients.values():
            await client.__aexit__(None, None, None)


async def test_another_owner_cannot_change_an_environment_that_others_run(shared):
    ann, bob, admin = shared["ann"], shared["bob"], shared["admin"]
    made = await ann.envs.create("weather", "1", description="ann's", start=["server"])
    for attempt in (
        lambda: bob.envs.update("weather", "1", revision=made["revision"], start=["sh", "-c", "evil"]),
        lambda: bob.envs.release("weather", "1"),
        lambda: bob.envs.delete("weather", "1"),
        lambda: bob.envs.create("weather", "2", start=["sh", "-c", "evil"]),
        lambda: bob.envs.create("other", "1", owner="ann"),
    ):
        with pytest.raises(PlaneForbidden):
            await attempt()
    assert (await ann.envs.get("weather", "1"))["spec"]["description"] == "ann's"
    assert not await ann.envs.exists("weather", "2")
    changed = await ann.envs.update("weather", "1", revision=made["revision"], description="changed")
    await admin.envs.update("weather", "1", revision=changed["revision"], description="by the admin")
    assert (await admin.envs.create("weather", "2"))["owner"] == "ann", "a name stays its owner's"
    await ann.envs.delete("weather", "1")


async def test_the_values_of_an_environments_variables_are_its_owners(plane, shared, noop):
    ann, bob = shared["ann"], shared["bob"]
    await ann.envs.create("api", "1", env={"TOKEN": SECRET}, extra={"note": SECRET})
    assert (await ann.envs.get("api", "1"))["spec"]["env"] == {"TOKEN": SECRET}
    assert (await shared["admin"].envs.get("api", "1"))["spec"]["env"] == {"TOKEN": SECRET}
    for who in ("bob", "agent"):
        assert SECRET not in str(await shared[who].envs.get("api", "1"))
        assert SECRET not in str([one async for one in shared[who].envs.list()])
    with pytest.raises(PlaneInvalid, match="TOKEN"):
        await bob.instances.create(env="api@1")
    made = await bob.instances.create(env="api@1", environment={"TOKEN": "bob's own"})
    assert dict((await plane.store.get_instance(made["id"])).plan.env) == {"TOKEN": "bob's own"}
    assert SECRET not in str(await bob.trace(made["id"]))
    own = await ann.instances.create(env="api@1")
    assert dict((await plane.store.get_instance(own["id"])).plan.env) == {"TOKEN": SECRET}


async def test_a_snapshot_opens_for_its_owner_alone(plane, shared):
    name = "snap_" + "0" * 25
    await plane.store.add_owner("snapshot", name, "ann", at=1.0)
    for image in (name, f"rollyard-snapshots:{name}", f"docker.io/library/rollyard-snapshots:{name}"):
        with pytest.raises(PlaneNotFound, match="no image"):
            await shared["bob"].instances.create(image=image)
        await shared["ann"].instances.create(image=image)
    await shared["bob"].envs.create("stolen", "1", image=name)
    with pytest.raises(PlaneNotFound, match="no image"):
        await shared["bob"].instances.create(env="stolen@1")
    await shared["ann"].envs.create("given", "1", image=name)
    await shared["bob"].instances.create(env="given@1")  # ann gives it in her environment


@pytest.mark.parametrize("plane_url", ["sqlite", "redis"], indirect=True)
async def test_what_is_older_than_owners_is_the_admins_to_give(plane, shared):
    name, data = "snap_" + "1" * 25, b"sent before there were owners"
    sha256 = hashlib.sha256(data).hexdigest()
    await plane.store.put_blob(sha256, data, owner="ann", at=1.0)
    for client in (shared["ann"], shared["bob"]):
        with pytest.raises(PlaneNotFound):
            await client.envs.download(sha256)
        with pytest.raises(PlaneNotFound, match="no image"):
            await client.instances.create(image=f"rollyard-snapshots:{name}")
    assert await shared["admin"].envs.download(sha256) == data
    await shared["admin"].envs.create("old", "1", owner="ann", image=name)
    await shared["ann"].instances.create(image=name)
    with pytest.raises(PlaneNotFound, match="no image"):
        await shared["bob"].instances.create(image=name)


async def test_a_bundle_is_fetched_by_those_who_sent_it(shared):
    data = b"the tests and their answers"
    sha256 = hashlib.sha256(data).hexdigest()
    ann, bob = shared["ann"], shared["bob"]
    assert await ann.envs.upload(data) == sha256
    with pytest.raises(PlaneNotFound):
        await bob.envs.download(sha256)
    asked = await bob.json("POST", "/v1/bundles", {"sha256": sha256, "size": len(data)})
    assert asked["exists"] is False, "that somebody has it is not told"
    assert await ann.envs.download(sha256) == data == await shared["admin"].envs.download(sha256)
    assert await bob.envs.upload(data) == sha256  # who has the bytes may have them here, too
    assert await bob.envs.download(sha256) == data


async def test_callers_without_a_key_have_a_namespace_of_their_own_and_nothing_else(tmp_path):
    async with serving(tmp_path) as env, aiohttp.ClientSession() as session:
        control = f"{env['AENV_SYSTEM_URL']}:8080"

        async def ask(method, path, **body):
            async with session.request(method, control + path, json=body or None) as reply:
                return reply.status, await reply.json()

        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            await plane.envs.create("weather", "1", engine="noop", env={"TOKEN": SECRET})
            project = {"deployConfig": {"start": ["sh", "-c", "evil"]}}
            for method, path, body in (
                ("GET", "/env/weather/1", {}),
                ("GET", "/env/weather/1/status", {}),
                ("PUT", "/env/weather/1", project),
                ("POST", "/env/weather/1/release", project),
                ("POST", "/env", {"name": "weather", "version": "2", **project}),
                ("POST", "/env-instance", {"envName": "weather@1"}),
            ):
                status, said = await ask(method, path, **body)
                assert status in (403, 404) and not said["success"] and SECRET not in str(said), (method, path, said)
            await ask("DELETE", "/env/weather")
            assert (await ask("GET", "/env/weather/1/exists"))[1]["data"] == {"exists": False}
            assert (await ask("GET", "/env"))[1]["data"] == []
            assert (await plane.envs.get("weather", "1"))["revision"] == 1
            assert not await plane.envs.exists("weather", "2")
            artifacts = [{"type": "image", "content": "repo/x:1"}]
            own = {"name": "mine", "version": "1", "deployConfig": {"engine": "noop"}, "artifacts": artifacts}
            assert (await ask("POST", "/env", **own))[1]["success"]
            assert [one["name"] for one in (await ask("GET", "/env"))[1]["data"]] == ["mine"]
            assert (await ask("POST", "/env-instance", envName="mine@1"))[1]["success"]


async def test_the_page_names_no_instance_without_the_key(tmp_path):
    async with serving(tmp_path, engine="noop") as env, httpx.AsyncClient(base_url=env["ROLLYARD_URL"]) as client:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            made = await plane.instances.create(image="host", labels={"who": "secret-label"})
        paths = ["/page/", "/page/plane", "/page/plane/instances", f"/page/plane/instances/{made['id']}"]
        for path in [*paths, "/page/plane/hub", "/page/plane/quotas"]:
            for headers in ({}, {"Authorization": "Basic " + base64.b64encode(b"admin:wrong").decode()}):
                said = await client.get(path, headers=headers)
                assert (
                    made["id"] not in said.text and made["id"][-8:] not in said.text and "secret-label" not in said.text
                )
        key = base64.b64encode(f"admin:{env['ROLLYARD_KEY']}".encode()).decode()
        shown = await client.get("/page/plane/instances", headers={"Authorization": f"Basic {key}"})
        assert shown.status_code == 200 and made["id"] in shown.text


async def test_who_reads_the_database_cannot_sign(tmp_path):
    """The signing secret is in a file of mode 600, and `rollyard plane rotate-secret` ends what it signed."""
    file = tmp_path / "signing"
    options = ("--signing-file", str(file))
    async with serving(tmp_path, *options, engine="noop") as env:
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            made = await plane.instances.create(image="host", ttl_s=600)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("p.db*"))
    assert file.read_text().strip().encode() not in kept
    with sqlite3.connect(tmp_path / "p.db") as database:
        assert [
            row for row in database.execute("SELECT name FROM plane_leases") if row[0] in ("signing", "faces")
        ] == []
    assert Signer(file.read_text().strip()).read("instance", made["token"].removeprefix("ryi-"), 1) == (made["id"],)
    rotate = [sys.executable, "-c", "from rollyard.cli.main import main; main()", "plane", "rotate-secret", *options]
    done = subprocess.run(rotate, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and str(file) in done.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Signer(file.read_text().strip()).read("instance", made["token"].removeprefix("ryi-"), 1) is None
    async with serving(tmp_path, *options, engine="noop") as env:
        async with ry.plane.connect(env["ROLLYARD_URL"], made["token"]) as plane:
            with pytest.raises(PlaneUnauthorized):
                await plane.json("GET", f"/v1/instances/{made['id']}")
        async with ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"]) as plane:
            again = (await plane.json("POST", f"/v1/instances/{made['id']}/token"))["token"]
            assert again != made["token"]


@pytest.mark.parametrize("claim", ["label", "field", "link"])
async def test_a_rollouts_id_on_an_instance_of_ones_own_reads_nothing_of_that_rollout(tmp_path, noop, claim):
    async with ry.Store.open(tmp_path / "p.db") as store:
        parts = await assemble(SqlPlane(store.database), {"noop": noop}, runs=store)
        ann, bob = [(await parts.access.issue(NewKey(role="owner", owner=owner)))[0] for owner in ("ann", "bob")]
        first = claim == "label"  # whose instance is listed first decides nothing
        forged = None if first else await forge(parts, claim)
        hers = await parts.instances.create(
            CreateInstance(image="host", labels={"rollyard.rollout": "ro_ann"}), owner="ann"
        )
        forged = await forge(parts, claim) if first else forged
        task, verdict = Task(id="secret-task", instruction="x"), Verdict(reward=0.5)
        await store.commit_rollout(Rollout(id="ro_ann", task=task, verdict=verdict, sandbox_id=hers.id))
        for name in ("ro_ann", forged.id):
            read = await parts.traces.chain(name, bob)
            assert read["instance"]["id"] == forged.id
            assert (read["rollout"], read["reward"], read["session"], read["policy"]) == (None, None, None, None)
        for name in ("ro_ann", hers.id):
            read = await parts.traces.chain(name, ann)
            assert (read["instance"]["id"], read["reward"], read["rollout"]["task_id"]) == (hers.id, 0.5, "secret-task")


async def forge(parts, claim: str):
    """An instance of bob's that says it is for ann's rollout."""
    labels = {"rollyard.rollout": "ro_ann"} if claim == "label" else {}
    asked = CreateInstance(image="host", labels=labels, rollout_id="ro_ann" if claim == "field" else None)
    made = await parts.instances.create(asked, owner="bob")
    return await parts.instances.link(made.id, "ro_ann") if claim == "link" else made
