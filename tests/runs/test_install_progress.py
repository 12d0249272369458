"""A first install is told of while it goes on: what it is, and how much of it is there; a second one is no news."""

import asyncio
import io

import anyio
import pytest
from msgspec.structs import replace

from rollyard import agents
from rollyard.core.agent import LayerSpec
from rollyard.core.events import Event
from rollyard.images.layers import Layers
from rollyard.runs.display.progress import display
from rollyard.runs.rollout.install_progress import INSTALLS, tell_install

pytestmark = pytest.mark.anyio


@pytest.fixture
def agent(tmp_path):
    (tmp_path / "own" / "bin").mkdir(parents=True)
    (tmp_path / "own" / "bin" / "tool").write_bytes(b"x" * 3_000_000)
    return replace(agents.get("shell-agent"), layer=LayerSpec(folder=str(tmp_path / "own")))


async def test_an_agent_is_told_of_while_it_is_installed_for_the_first_time_alone(tmp_path, agent):
    layers, told, heard = Layers(tmp_path / "images"), [], anyio.Event()

    async def tell(name, **fields):
        told.append((name, fields))
        heard.set()

    async with tell_install(agent, layers, tell):
        with anyio.fail_after(30):
            await heard.wait()
        await layers.build(agent.layer)
    assert told[0] == (INSTALLS, {"packages": "shell-agent", "megabytes": 0.0})
    told.clear()
    before = asyncio.all_tasks()
    async with tell_install(agent, layers, tell):
        assert asyncio.all_tasks() == before  # nobody watches
    assert told == []


async def test_what_is_there_of_a_build_under_way_is_counted(tmp_path, agent):
    layers = Layers(tmp_path / "images")
    await layers.build(agent.layer)
    assert layers.bytes_so_far(agent.layer) == 0
    (index,) = (layers.root / "index").glob("[!.]*")
    work = layers.dir / f".new-{index.name}-elsewhere" / "root"
    work.mkdir(parents=True)
    (work / "tool").write_bytes(b"x" * 3_000_000)
    assert layers.bytes_so_far(agent.layer) == 3_000_000


async def test_plain_lines_name_an_install_once():
    out = io.StringIO()
    with display("plain", out) as shown:
        for megabytes in (0.0, 4.5):
            fields = {"packages": "a@1", "megabytes": megabytes}
            await shown.event(Event(at=0, name=INSTALLS, rollout_id="ro_1", fields=fields))
    assert out.getvalue() == "installing a@1, once\n"
