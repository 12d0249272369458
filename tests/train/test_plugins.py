"""What each trainer loads is run by that trainer: agents of a real server, a tiny model that answers their calls, and at least one
step of the trainer's own loss. Where a package cannot be had here the test says why it is skipped."""

import anyio
import pytest

from tests.train.foreign_python import foreign
from tests.train.served import server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TORCH = ("torch==2.13.0", "transformers==5.17.0")


async def told(tmp_path, run, script, *words):
    """What a script says of rollouts whose calls its engine answers."""
    served = ("--policy", "queue#renderer=bytes", "--parallel", "4", "--jobs", "8")
    async with server(tmp_path, *served, script=None) as (url, _):
        return await anyio.to_thread.run_sync(run, script, *words, url)


@pytest.mark.parametrize("part", ["step", "own_generation", "worker"])
async def test_trl_trains_on_rollouts_of_a_server(tmp_path, part):
    run = foreign("trl-1.16.0", "trl==1.16.0", *TORCH, "requests")
    assert await told(tmp_path, run, "plugin_trl.py", part) == "ok"
