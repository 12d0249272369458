"""Folders pushed to the hub and pulled again; backup and restore of what the hub keeps."""

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import aiohttp
import msgspec
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, PlaneConflict, PlaneForbidden, PlaneInvalid, PlaneNotFound
from rollyard.core.ids import new_id
from rollyard.images.store import ImageStore
from rollyard.plane.api.app import plane_app
from rollyard.plane.client.push import MAX_FILES, pack, pull, push, read_project, unpack
from rollyard.plane.parts import ephemeral_plane
from rollyard.plane.service.access import NewKey
from rollyard.plane.service.builds import BuildRecord, hosts_of_builds
from rollyard.plane.storage.sql import SqlPlane
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.testing.serve import serve_app

pytestmark = pytest.mark.anyio
TASK = Path(__file__).parents[2] / "examples" / "tasks" / "file-edit"
RY = [sys.executable, "-c", "from rollyard.cli.main import main; main()"]


def project(folder):
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "custom_env.py").write_text("# tools\n")
    config = {
        "name": "my env",
        "version": "0.1",
        "tags": ["linux"],
        "artifacts": [{"type": "image", "content": "reg/x:1"}],
        "deployConfig": {"cpu": "500m", "memory": "2G", "environmentVariables": {"A": 1}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("plane_url", ["sqlite"], indirect=True)
async def test_a_task_folder_and_an_aenv_project_are_pushed_and_come_back_the_same(plane, tmp_path):
    _, key = await plane.access.issue(NewKey(role="owner", owner="ann"))
    aenv = project(tmp_path / "aenv")
    async with serve_app(plane.app) as url, ry.plane.connect(url, key) as client:
        first = await push(client, TASK, version="1.0", image="host")
        assert first["spec"]["tags"] == ["harbor"] and first["spec"]["description"] and first["spec"]["verifier"]
        again = await push(client, TASK, version="1.0", image="host")
        assert again["revision"] == 2 and again["spec"]["artifacts"] == first["spec"]["artifacts"]
        await push(client, TASK, version="1.0", image="host", release=True)
        with pytest.raises(PlaneConflict):
            await push(client, TASK, version="1.0", image="host")
        made = await push(client, aenv)
        assert (made["id"], made["spec"]["image"], made["spec"]["env"]) == ("my-env@0.1", "reg/x:1", {"A": "1"})
        assert made["spec"]["resources"]["cpus"] == 0.5 and made["spec"]["resources"]["memory_mb"] == 2048
        back = await pull(client, made["name"], made["version"], tmp_path / "back")
        assert pack(back) == pack(aenv)
        where = {**os.environ, "ROLLYARD_URL": url, "ROLLYARD_KEY": key}
        command = [*RY, "push", str(aenv), "--version", "0.2", "--json"]
        process = await asyncio.create_subprocess_exec(*command, env=where, stdout=asyncio.subprocess.PIPE)
        assert json.loads((await process.communicate())[0])["id"] == "my-env@0.2"


def test_folders_that_cannot_be_pushed_say_why(tmp_path):
    with pytest.raises(ConfigError, match="neither a task folder"):
        read_project(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="not one of an aenv project"):
        read_project(tmp_path)
    (tmp_path / "config.json").write_text('{"name": "a", "version": "1"}')
    with pytest.raises(ConfigError, match="--image"):
        read_project(tmp_path)


@pytest.mark.adversarial
def test_links_are_not_sent_and_hostile_bundles_write_nothing_outside(tmp_path):
    folder = project(tmp_path / "aenv")
    (folder / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="is a link"):
        pack(folder)
    for n, (name, kind, target) in enumerate(
        (
            ("../escaped", tarfile.REGTYPE, ""),
            ("/tmp/escaped-absolute", tarfile.REGTYPE, ""),
            ("link", tarfile.SYMTYPE, "/etc"),
            ("hard", tarfile.LNKTYPE, "/etc/passwd"),
            ("device", tarfile.CHRTYPE, ""),
        )
    ):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            tar.addfile(entry, io.BytesIO(b""))
        place = tmp_path / f"out{n}"
        try:
            unpack(buffer.getvalue(), place)
        except ConfigError:
            pass
        assert not (tmp_path / "escaped").exists() and not Path("/tmp/escaped-absolute").exists()
        assert not any(path.is_symlink() for path in place.rglob("*"))
    with pytest.raises(ConfigError):
        unpack(b"not a tar", tmp_path / "noise")


@pytest.mark.adversarial
@pytest.mark.parametrize("attack", ["many", "packed", "holes"])
def test_a_bundle_unpacks_to_no_more_than_was_sent(tmp_path, attack):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz" if attack == "packed" else "w") as tar:
        if attack == "many":
            for number in range(MAX_FILES + 1):
                tar.addfile(tarfile.TarInfo(str(number)))
        elif attack == "packed":
            entry = tarfile.TarInfo("zeros")
            entry.size = 64 << 20
            tar.addfile(entry, io.BytesIO(bytes(entry.size)))
        else:
            entry = tarfile.TarInfo("holes")
            entry.pax_headers = {"GNU.sparse.size": str(1 << 40), "GNU.sparse.map": f"{(1 << 40) - 1},1"}
            entry.size = 1
            tar.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(ConfigError):
        unpack(buffer.getvalue(), tmp_path / "bundle")
    assert not list((tmp_path / "bundle").iterdir())


async def test_a_backup_of_a_store_in_use_restores_to_the_same_hub(tmp_path):
    from rollyard.core.plane import EnvSpec
    from rollyard.plane.service.hub import Hub
    from tests.plane.conftest import OWNER

    kept, copy, back = tmp_path / "p.db", tmp_path / "copy.db", tmp_path / "back.db"
    async with ry.Store.open(kept) as store:
        made = await Hub(SqlPlane(store.database)).create("e", "1", EnvSpec(image="python"), by=OWNER)
        done = subprocess.run(
            [*RY, "store", "backup", str(copy), "--store", str(kept)], capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    done = subprocess.run([*RY, "store", "restore", str(copy), str(back), "--json"], capture_output=True, timeout=60)
    assert json.loads(done.stdout) == {"store": str(back)}
    async with ry.Store.open(back) as store:
        assert await Hub(SqlPlane(store.database)).get("e", "1") == made
    done = subprocess.run([*RY, "store", "restore", str(copy), str(back)], capture_output=True, timeout=60)
    assert done.returncode != 0


SERVER = """
import http.server, os
class Env(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = (os.environ["COLOUR"] + " " + os.getcwd()).encode()
        self.send_response(200); self.send_header("content-length", str(len(said))); self.end_headers()
        self.wfile.write(said)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", 8081), Env).serve_forever()
"""
DOCKERFILE = 'FROM host\nWORKDIR /srv/env\nCOPY . .\nENV COLOUR=blue\nCMD ["python3", "server.py"]\n'


def folder_of(kind, place):
    """A folder of each kind with the same server in it, whose Dockerfile is where that kind has it."""
    inner = {"harbor": place / "environment", "openenv": place / "server", "aenv": place}[kind]
    inner.mkdir(parents=True)
    (inner / "Dockerfile").write_text(DOCKERFILE)
    if kind == "harbor":
        for name in ("instruction.md", "task.toml"):
            (place / name).write_bytes((TASK / name).read_bytes())
        (place / "tests").mkdir()
        (place / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    elif kind == "openenv":
        (place / "openenv.yaml").write_text("spec_version: 1\nname: echo_env\nport: 8081\n")
    else:
        (place / "config.json").write_text(json.dumps({"name": "echo", "version": "1.0", "artifacts": []}))
    (inner if kind == "harbor" else place).joinpath("server.py").write_text(SERVER)
    return place


@pytest.fixture
async def building(tmp_path):
    """A plane on local sandboxes, and a client of an owner's."""
    async with LocalBackend() as backend, ephemeral_plane(backend) as plane:
        _, key = await plane.access.issue(NewKey(role="owner", owner="ann"))
        async with serve_app(plane_app(plane)) as url, ry.plane.connect(url, key) as client:
            yield plane, client


async def test_a_build_reaches_the_hosts_that_the_operator_names_and_all_that_it_prints_is_kept(tmp_path):
    """What a package mirror is to it: a host on the list. The rest is as far away as without a network."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    fetch = "import urllib.request as r; print(r.urlopen('http://{}:{}/', timeout=20).read())"
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, LocalBackend() as backend:
        port = server.sockets[0].getsockname()[1]
        hosts = hosts_of_builds(f"allow:mirror.test:{port}@127.0.0.1")
        for name, host in (("open", "mirror.test"), ("shut", "elsewhere.test")):
            (tmp_path / name).mkdir()
            lines = [
                "FROM host",
                f"RUN echo {new_id('once')} && seq 20000",
                f'RUN python3 -c "{fetch.format(host, port)}"',
                "RUN echo at its end",
            ]
            (tmp_path / name / "Dockerfile").write_text("\n".join(lines))
        async with ephemeral_plane(backend, build_hosts=hosts) as plane:
            _, key = await plane.access.issue(NewKey(role="owner", owner="ann"))
            _, others = await plane.access.issue(NewKey(role="owner", owner="bob"))
            async with serve_app(plane_app(plane)) as url, ry.plane.connect(url, key) as client:
                for name in ("open", "shut"):
                    bundle = await client.envs.upload(pack(tmp_path / name))
                    await client.envs.create(name, "1", build={"bundle": bundle, "dockerfile": "Dockerfile"})
                await client.instances.create(env="open@1", ttl_s=120)
                with pytest.raises(PlaneInvalid, match="could not be built"):
                    await client.instances.create(env="shut@1", ttl_s=120)
                said = await client.envs.build_output("open", "1", "local")
                assert "\n1\n2\n3\n" in said and "\n20000\n" in said and len(said) > 100_000
                assert "b'hello'" in said and "RUN echo at its end" in said
                failed = await client.envs.build_output("shut", "1", "local")
                assert "\n20000\n" in failed and "HTTP Error 403" in failed and "at its end" not in failed
                assert "Dockerfile:3: RUN" in failed and "rollyard-build-" not in failed
                async with ry.plane.connect(url, others) as bob:
                    with pytest.raises(PlaneForbidden):
                        await bob.envs.build_output("open", "1", "local")
                with pytest.raises(PlaneNotFound):
                    await client.envs.build_output("open", "1", "noop")


def test_the_network_of_builds_is_the_operators_word():
    assert hosts_of_builds("none") == ()
    assert hosts_of_builds("public") == ("*",)
    with pytest.raises(ConfigError, match="not 'task'"):
        hosts_of_builds("task")
    with pytest.raises(ConfigError, match="none, allow:HOST,... or public, not 'bogus'"):
        hosts_of_builds("bogus")
    for every in ("allow:*", "allow:pypi.org,*"):
        with pytest.raises(ConfigError, match="every host") as refused:
            hosts_of_builds(every)
        assert "say public" in str(refused.value.hint)


@pytest.mark.parametrize(
    "kind", ["aenv", pytest.param("harbor", marks=pytest.mark.slow), pytest.param("openenv", marks=pytest.mark.slow)]
)
async def test_a_folder_with_a_dockerfile_is_built_once_and_its_server_answers(building, tmp_path, kind):
    plane, client = building
    made = await push(client, folder_of(kind, tmp_path / "folder"), version="1.0")
    assert made["spec"]["build"]["bundle"] == made["spec"]["artifacts"]["bundle"]
    one, two = [await client.instances.create(env=made["id"], ttl_s=120) for _ in range(2)]
    await client.instances.wait(one["id"], 8081, "/")
    said = await client.bytes("GET", f"/v1/instances/{one['id']}/data/x")
    assert said == b"blue /srv/env"
    (told,) = (await client.envs.builds(made["name"], "1.0")).values()
    assert told["start"][-2:] == ["python3", "server.py"] and told["seconds"] > 0
    (kept,) = await plane.store.list_records("build", "local", after="", limit=9)
    built = msgspec.json.decode(kept.data, type=BuildRecord)
    assert (
        kept.revision == 1
        and built.image == (await plane.instances.record(two["id"])).plan.image
        and "instructions" in built.log
    )


async def test_an_aenv_project_is_built_where_its_image_is_unknown_and_runs_aenvironments_server(building, tmp_path):
    """As its own examples are: an image in a registry, and a Dockerfile that names no program."""
    plane, client = building
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tools.py").write_text("# tools\n")
    (tmp_path / "aenv").mkdir()  # in place of the package
    (tmp_path / "aenv" / "main.py").write_text("import sys\nassert sys.argv[1:] == ['src'], sys.argv\n" + SERVER)
    (tmp_path / "Dockerfile").write_text("FROM host\nWORKDIR /app\nENV COLOUR=green\nCOPY . .\n")
    name = f"docker.io/aenv/{new_id('demo')}:1.0"
    config = {"name": "demo", "version": "1.0", "artifacts": [{"type": "image", "content": name}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    record = await push(client, tmp_path)
    made = await client.instances.create(env="demo@1.0", ttl_s=120)
    url = await client.instances.wait(made["id"], 8081, "/")
    async with aiohttp.request("GET", url) as reply:
        assert await reply.text() == "green /app"
    built = (await plane.instances.record(made["id"])).plan.image
    await ImageStore().add(built, names=[name])
    try:
        await client.envs.create("known", "1", image=name, build={"bundle": record["spec"]["build"]["bundle"]})
        there = await client.instances.create(env="known@1", ttl_s=60)
        assert (await plane.instances.record(there["id"])).plan.image == name
        assert await client.envs.builds("known", "1") == {}, "what is there is not built"
    finally:
        await ImageStore().remove(name)


async def test_files_without_a_dockerfile_are_laid_over_an_image_and_a_build_that_fails_says_why(building, tmp_path):
    plane, client = building
    (tmp_path / "files" / "sub").mkdir(parents=True)
    (tmp_path / "files" / "sub" / "note").write_text("laid")
    (tmp_path / "files" / "Broken").write_text("FROM host\nRUN echo it broke; exit 3\n")
    sha256 = await client.envs.upload(pack(tmp_path / "files"))
    await client.envs.create("laid", "1", build={"bundle": sha256, "target": "/data"}, start=["sleep", "1000"])
    made = await client.instances.create(env="laid@1", ttl_s=120)
    assert await client.instances.read(made["id"], "/data/sub/note") == b"laid"
    for build, words in (
        ({"bundle": sha256, "dockerfile": "Broken"}, "it broke"),
        ({"bundle": sha256, "dockerfile": "None"}, "there is no None"),
        ({"bundle": sha256, "dockerfile": "../../etc/passwd"}, "not below"),
        ({"bundle": sha256, "context": ".."}, "no folder"),
        ({"bundle": sha256, "base": "no-such-image"}, "no-such-image"),
    ):
        await client.envs.create("bad", "1", build=build)
        with pytest.raises(PlaneInvalid, match=words):
            await client.instances.create(env="bad@1", ttl_s=120)
        await client.envs.delete("bad", "1")
    _, other = await plane.access.issue(NewKey(role="owner", owner="bob"))
    async with ry.plane.connect(client.url, other) as bob:
        await bob.envs.create("stolen", "1", build={"bundle": sha256})
        with pytest.raises(PlaneNotFound, match="has not pushed"):
            await bob.instances.create(env="stolen@1", ttl_s=120)


@pytest.mark.adversarial
async def test_a_build_reads_neither_the_servers_files_nor_another_owners_snapshot(building, tmp_path):
    """What a Dockerfile may name is what its owner may open: images by their names, and snapshots of their own."""
    plane, client = building
    (tmp_path / "secret").write_text("the server's")
    anns = await client.instances.create(image="host", ttl_s=120)
    await client.instances.write(anns["id"], "/opt/secret", b"of ann")
    taken = await client.instances.snapshot(anns["id"])
    _, other = await plane.access.issue(NewKey(role="owner", owner="bob"))
    async with ry.plane.connect(client.url, other) as bob:
        for number, (lines, words) in enumerate(
            (
                (f"FROM {tmp_path}", "an image has a name"),
                (f"FROM host\nCOPY --from={tmp_path} secret /opt/secret", "an image has a name"),
                (f"ARG A={tmp_path}\nFROM ${{A}}", "an image has a name"),
                (f"FROM {taken}", "no image"),
                (f"FROM host\nCOPY --from={taken} /opt/secret /opt/secret", "no image"),
            )
        ):
            (tmp_path / "files").mkdir(exist_ok=True)
            (tmp_path / "files" / "Dockerfile").write_text(f"{lines}\n")
            sha256 = await bob.envs.upload(pack(tmp_path / "files"))
            await bob.envs.create(f"stolen{number}", "1", build={"bundle": sha256, "dockerfile": "Dockerfile"})
            with pytest.raises(PlaneInvalid, match=words):
                made = await bob.instances.create(env=f"stolen{number}@1", ttl_s=120)
                print(await bob.instances.read(made["id"], "/opt/secret"))
    await client.envs.create("mine", "1", build={"bundle": await client.envs.upload(pack(TASK)), "base": taken})
    mine = await client.instances.create(env="mine@1", ttl_s=120)
    assert await client.instances.read(mine["id"], "/opt/secret") == b"of ann"


def test_a_plane_that_is_not_there_is_named_with_what_to_do(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # it does not listen, so a caller is refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        env = {**os.environ, "ROLLYARD_URL": url, "ROLLYARD_KEY": "ryk-" + "x" * 32}
        done = subprocess.run([*RY, "push", str(TASK), "--version", "1"], env=env, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith(f"rollyard: no control plane answers at {url} (start one with `rollyard serve plane`")
