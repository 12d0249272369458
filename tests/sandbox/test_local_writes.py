"""What a local sandbox wrote, as its host sees it: no program inside hides a file or sets the time of its change."""

from __future__ import annotations

import time

import pytest

from rollyard.core.protocols import ListsWrites
from rollyard.sandbox.local import writes

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]


async def test_files_written_later_are_listed_and_their_times_cannot_be_forged(box):
    assert isinstance(box, ListsWrites)
    await box.exec("mkdir -p /opt/x; echo 1 > /opt/x/before; echo 1 > /opt/x/again; echo 1 > /opt/x/gone", timeout=20)
    since = time.time() + 0.05
    while time.time() < since:
        await box.exec("true", timeout=20)
    await box.exec(
        "cd /opt/x; echo 2 > again; rm gone; echo 1 > new; touch -d 2001-01-01 new again; ln -s new link; echo 1 > /tmp/no;"
        " mkdir __pycache__; echo 1 > __pycache__/no.pyc; chmod 600 /opt/x/new",
        timeout=20,
    )
    listed = await box.list_writes(since - 0.04)
    assert {path for path in listed if path.startswith(("/opt", "/tmp"))} >= {
        "/opt/x/again",
        "/opt/x/new",
        "/opt/x/link",
    }
    assert "/opt/x/before" not in listed
    assert not [path for path in listed if "__pycache__" in path or path.startswith("/tmp")]


async def test_of_very_many_those_nearest_to_the_root_are_kept(box):
    deep = "/opt/many/a/b/c"
    await box.exec(f"mkdir -p {deep}; cd {deep}; seq {writes.MOST + 50} | xargs touch; touch /opt/near", timeout=60)
    listed = await box.list_writes(0)
    assert len(listed) == writes.MOST
    assert "/opt/near" in listed
