"""Links that no path can name are taken out like the others, and void nothing."""

import pytest

from rollyard.core.sandbox import SandboxSpec
from rollyard.tasks.look_scripts import run_looks
from rollyard.tasks.planted_links import list_script, read_listed, remove_links

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]

NEST = """
import os
for _ in range(60): os.mkdir('n' * 255); os.chdir('n' * 255)
os.symlink('/tests/expected.txt', 'deep')
"""


async def list_links(box):
    (listed,) = await run_looks(box, "links", [list_script(["/app"])])
    return read_listed(listed)


async def test_a_link_deeper_than_a_path_can_name_is_removed_and_noted(backend):
    async with backend.open(SandboxSpec(ttl_s=300)) as box:
        await box.mkdir("/app")
        made = await box.exec(["python3", "-c", NEST], cwd="/app", timeout=20)
        assert made.ok and (await box.exec("ln -s /tests/x near; ln -s /etc good", cwd="/app", timeout=20)).ok
        notes = await remove_links(box, ["/app"], {}, await list_links(box))
        left = await list_links(box)
    assert len(notes) == 2 and all("left behind" in note for note in notes)
    assert left is not None and set(left) == {"/app/good"}
