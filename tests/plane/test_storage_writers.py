"""Writers of two processes at once, on every storage; the ordinary run has one database of a file and one that is served."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from rollyard.core.plane import EnvRecord, EnvSpec
from rollyard.plane.storage.open import open_plane

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("postgres", "redis-no-multi", "redis-least")]
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("plane_url", ["sqlite", "redis", *SLOW], indirect=True)]


@pytest.fixture
async def store(plane_url):
    async with open_plane(plane_url) as (store, _):
        yield store


async def test_32_writers_in_each_of_two_processes_lose_no_update_and_no_place(store, plane_url):
    record = EnvRecord(
        name="e", version="1", owner="team", revision=1, status="draft", spec=EnvSpec(), created_at=1.0, updated_at=1.0
    )
    await store.create_env(record)
    script = str(Path(__file__).with_name("writers.py"))
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, script, plane_url, name, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        for name in ("a", "b")
    ]
    async with asyncio.timeout(300):
        said = [int((await process.communicate())[0].split()[-1]) for process in processes]
    found = await store.get_env("e", "1")
    assert set(found.spec.tags) == {f"{name}-{n}" for name in "ab" for n in range(32)}
    assert (found.revision, len(found.spec.tags)) == (65, 64)
    assert sum(said) == (await store.usage("ann")).used == 40
    listed = await store.list_instances(
        owner="ann", env=None, run_id=None, rollout_id=None, live=True, labels={}, after="", limit=500
    )
    assert len(listed) == 40
