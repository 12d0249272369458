"""Folders pushed to the hub and pulled again; backup and restore of what the hub keeps."""

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, PlaneConflict
from rollyard.plane.client.push import MAX_FILES, pack, pull, push, read_project, unpack
from rollyard.plane.service.access import NewKey
from rollyard.plane.storage.sql import SqlPlane
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
