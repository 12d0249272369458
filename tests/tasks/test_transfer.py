"""What travels from an agent's sandbox to a judge's, and what is washed off on the way."""

from __future__ import annotations

import os
import stat

import pytest

from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import Artifact
from rollyard.tasks.transfer import take

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]


@pytest.fixture
async def box(backend):
    async with backend.open(SandboxSpec(ttl_s=300)) as sandbox:
        yield sandbox


async def test_set_user_id_bits_do_not_travel(box, tmp_path):
    made = "mkdir -p app/d; for f in app/s app/d/g one; do echo x > $f; done; chmod 6755 app/s one; chmod 2711 app/d/g"
    assert (await box.exec(f"{made}; chmod 3777 app/d", cwd="/srv", timeout=20)).ok
    load = await take(box, [Artifact(source="/srv/app"), Artifact(source="/srv/one")], tmp_path)
    assert not load.notes
    folder, file = (item.host for item in load.items)
    found = [stat.S_IMODE(os.lstat(path).st_mode) for path in (folder / "s", folder / "d", folder / "d/g", file)]
    assert found == [0o755, 0o777, 0o711, 0o755]
