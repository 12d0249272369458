"""An agent leaves directories a thousand and more inside each other: nothing that comes after it may stumble over them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core import folders
from rollyard.core.task import Artifact
from rollyard.images import tars, tree_pipe
from rollyard.runs.rollout.collect import copy_out
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.tasks import transfer

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]


@pytest.fixture(autouse=True)
def deep_trees_are_removed(tmp_path):
    """pytest clears old folders by recursion, which trees of this depth end."""
    yield
    folders.remove(tmp_path)


NEST = """
import os, sys
for place in sys.argv[3:]:
    os.chdir(place)
    for _ in range(int(sys.argv[1])):
        os.mkdir(sys.argv[2]); os.chdir(sys.argv[2]); open("file", "w").close()
"""
DEEP, LONG = ("1500", "d"), ("60", "n" * 255)


async def nest(box: ry.Sandbox, shape: tuple[str, str], *places: str) -> None:
    done = await box.exec(["python3", "-c", NEST, *shape, *places], timeout=60)
    assert done.ok, done.text


async def rollyard(root: Path, *arguments: str) -> dict:
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("rollyard"), *arguments, "--json", stdout=-1, stderr=-1,
        env={**os.environ, "ROLLYARD_HOME": str(root)},
    )  # fmt: skip
    output, said = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, said.decode()[-2000:]
    return json.loads(output)


@pytest.mark.parametrize("shape", [DEEP, LONG], ids=["deep", "long names"])
async def test_what_is_left_deep_down_goes_with_its_sandbox(tmp_path, shape):
    async with LocalBackend(root=tmp_path) as backend:
        async with backend.open(ry.SandboxSpec()) as box:
            await nest(box, shape, "/workspace", "/tmp")
            assert tree_pipe.usage(str(tmp_path / "boxes")).bytes > int(shape[0]) * 2 * 4096
            await box.remove(f"/tmp/{shape[1]}")
            assert not await box.exists(f"/tmp/{shape[1]}")
    assert list((tmp_path / "boxes").iterdir()) == []


@pytest.mark.parametrize("shape", [DEEP, LONG], ids=["deep", "long names"])
@pytest.mark.parametrize("verb", ["doctor", "clean", "open"])
@pytest.mark.ordinary("clean-deep")
async def test_every_command_works_on_a_home_with_a_deep_tree_and_sweeps_it(tmp_path, shape, verb):
    left = tmp_path / "boxes" / "sbx_left"
    (left / "fs").mkdir(parents=True)
    (left / "box.json").write_text("{}")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", NEST, *shape, str(left / "fs"))
    assert await process.wait() == 0
    if verb == "open":
        async with LocalBackend(root=tmp_path) as backend, backend.open(ry.SandboxSpec()) as box:
            assert (await box.exec(["true"], timeout=20)).ok
    elif verb == "clean":
        assert (await rollyard(tmp_path, "clean"))["removed"] == ["sbx_left"]
    else:
        rows = {row["name"]: row["state"] for row in (await rollyard(tmp_path, "doctor"))["findings"]}
        assert rows["local"] == "ok"
    assert not left.exists()


async def test_a_sweep_steps_over_what_it_cannot_remove(tmp_path):
    """A directory that stands for what no removal gets at: something is mounted in it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount something for a test")
    for name in ("sbx_kept", "sbx_left"):
        (tmp_path / "boxes" / name / "fs").mkdir(parents=True)
    code = (
        "import asyncio, os, sys, rollyard as ry\n"
        "from rollyard.sandbox.local.backend import LocalBackend\n"
        "assert os.system(f'mount -t tmpfs none {sys.argv[1]}/boxes/sbx_kept/fs') == 0\n"
        "async def main():\n"
        "    for _ in range(2):\n"
        "        async with LocalBackend(root=sys.argv[1]) as backend, backend.open(ry.SandboxSpec()) as box:\n"
        "            print('got', (await box.exec('echo ran', timeout=20)).text.strip(), await backend.reap())\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(
        "unshare", "--mount", sys.executable, "-c", code, str(tmp_path), stdout=-1, stderr=-1
    )
    output, said = await asyncio.wait_for(process.communicate(), 60)
    got = [line for line in output.decode().splitlines() if line.startswith("got ")]
    assert got == ["got ran ['sbx_left']", "got ran []"], said.decode()
    assert (output + said).count(b"sandbox.left_on_disk") == 1


@pytest.mark.slow
async def test_a_deep_working_directory_is_copied_judged_and_snapshotted(tmp_path):
    async with LocalBackend(root=tmp_path / "home") as backend, backend.open(ry.SandboxSpec()) as box:
        await nest(box, DEEP, "/workspace")
        copied = await copy_out(box, "/workspace")
        assert copied.why is None and copied.tar is not None and len(copied.files) == 1500
        with tarfile.open(fileobj=io.BytesIO(copied.tar)) as archive:
            assert len(archive.getmembers()) == 3001
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        load = await transfer.take(box, [Artifact(source="/workspace")], scratch)
        await transfer.put(load, box, user=None)
        deepest = "/workspace" + "/d" * 1500
        assert await box.exists(f"{deepest}/file")
        packed = io.BytesIO()
        tars.pack(str(scratch / "0"), "in", (0, 0), packed)
        with tarfile.open(fileobj=io.BytesIO(packed.getvalue())) as archive:
            assert len(archive.getmembers()) == 3000
        folders.remove(scratch)  # before pytest, which recurses, gets to it
        image = await box.snapshot()
        async with backend.open(ry.SandboxSpec(image=image)) as fork:
            assert await fork.exists(f"{deepest}/file")


async def test_of_a_working_directory_with_endless_names_all_is_copied_that_a_path_can_name(tmp_path):
    async with LocalBackend(root=tmp_path / "home") as backend, backend.open(ry.SandboxSpec()) as box:
        await nest(box, LONG, "/workspace")
        await box.write("/workspace/beside", b"kept")
        assert await box.download_dir("/workspace", str(tmp_path / "out")) == 1
        assert (tmp_path / "out" / "beside").read_bytes() == b"kept"
        copied = await copy_out(box, "/workspace")
        assert copied.why is None and copied.files["beside"] == b"kept" and copied.left_out == 1
        assert max(len(name) for name in copied.files) < 4096 < 60 * 255


def test_of_an_archive_with_endless_names_all_is_unpacked_that_a_path_can_name(tmp_path):
    with (tmp_path / "packed.tar").open("w+b") as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name in ("top/beside", f"top/{'n/' * 2000}file"):
                archive.addfile(tarfile.TarInfo(name))
        packed.seek(0)
        (tmp_path / "out").mkdir()
        assert tars.unpack(os.dup(packed.fileno()), str(tmp_path / "out"), 2**20) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["beside"]
