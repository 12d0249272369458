"""What runs in a sandbox is waited for until it rests."""

from __future__ import annotations

import pytest

from rollyard.core.sandbox import SandboxSpec
from rollyard.runs.rollout.programs import list_programs, wait_until_idle

pytestmark = pytest.mark.anyio
WORKS = 'i=0; while [ "$i" -lt 200000 ]; do i=$((i+1)); done; '


async def test_programs_that_work_are_waited_for_until_they_rest(backend):
    async with backend.open(SandboxSpec()) as sandbox:
        await sandbox.start(f"{WORKS} echo written > late.txt; exec sleep 600", cwd="/tmp")
        assert await wait_until_idle(sandbox, 0.2)
        assert (await sandbox.read("/tmp/late.txt")) == b"written\n"
        assert "sleep" in (await list_programs(sandbox)).values()
