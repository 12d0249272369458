"""`rollyard clean`, on a home of its own."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.images.build import build
from rollyard.images.build_types import FileCache
from rollyard.sandbox.local.backend import LocalBackend

pytestmark = pytest.mark.anyio


async def clean(root: Path, *options: str) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("rollyard"), "clean", "--json", *options, stdout=-1,
        env={**os.environ, "ROLLYARD_HOME": str(root)},
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    return json.loads(output)["removed"]


async def test_clean_removes_what_is_dead_and_ends_only_what_is_named(tmp_path):
    async with LocalBackend(root=tmp_path) as backend:
        kept = await backend.open(ry.SandboxSpec(labels={"run": "kept"}))
        ended = await backend.open(ry.SandboxSpec(labels={"run": "ended"}))
        left = tmp_path / "boxes" / "sbx_left"
        (left / "fs" / "root" / "work" / "work").mkdir(parents=True)
        (left / "fs" / "root" / "work" / "work").chmod(0)
        (left / "box.json").write_text("{}")
        assert await clean(tmp_path) == ["sbx_left"]
        assert not left.exists() and await kept.alive() and await ended.alive()
        assert await clean(tmp_path, "--label", "run=ended") == [ended.id]
        assert await kept.alive() and not await ended.alive()
        assert await clean(tmp_path, "--all") == [kept.id]
        assert not await kept.alive()


async def test_a_sandbox_whose_first_process_ended_is_not_listed_though_its_lock_is_still_held(tmp_path):
    async with LocalBackend(root=tmp_path) as backend:
        sandbox = await backend.open(ry.SandboxSpec(image="host"))
        [entry] = tmp_path.rglob(f"{sandbox.id}/box.json")
        written = entry.read_bytes()
        await sandbox.kill()
        entry = entry.parent.with_name("sbx_left") / "box.json"  # not its own place, which is being removed
        entry.parent.mkdir()
        entry.write_bytes(written)
        with entry.open() as held:  # as a blank does that was cloned beside it and has not closed what it inherited
            fcntl.flock(held, fcntl.LOCK_EX)
            assert await backend.list() == []


async def test_images_that_were_built_go_and_named_ones_stay(tmp_path):
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM host\nRUN echo built > /built\n")
    root = tmp_path / "home"
    async with LocalBackend(root=root) as backend:
        cache = FileCache(root / "builds")
        built = await build(str(context), backend, backend.images, cache)
        box = await backend.open(ry.SandboxSpec(image=built.image))
        kept = await box.snapshot()
        with pytest.raises(ConfigError, match="1 sandboxes are open"):
            await backend.remove_baked()
        await box.kill()
        assert await clean(root, "--baked") == [built.image]
        with pytest.raises(UnknownName):
            await backend.images.find(built.image)
        async with backend.open(ry.SandboxSpec(image=kept)) as again:
            assert (await again.exec(["cat", "/built"], timeout=30)).stdout == b"built\n"
        rebuilt = await build(str(context), backend, backend.images, cache)
        await backend.images.catalog.name(rebuilt.image, ["mine"])
        assert await clean(root, "--baked") == []
        async with backend.open(ry.SandboxSpec(image="mine")) as again:
            assert (await again.exec(["cat", "/built"], timeout=30)).stdout == b"built\n"
