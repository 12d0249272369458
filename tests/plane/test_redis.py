"""What is particular to Redis: it must run scripts, and runs are not kept there."""

import pytest

from rollyard.core.errors import ConfigError
from rollyard.plane.storage.open import open_plane
from rollyard.store import Store

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("plane_url", ["redis-no-scripts"], indirect=True)
async def test_a_server_that_runs_no_scripts_is_refused_with_what_to_do(plane_url):
    with pytest.raises(ConfigError, match="runs no scripts") as refused:
        async with open_plane(plane_url):
            pass
    assert "+@scripting" in (refused.value.hint or "")


async def test_runs_on_redis_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="need SQL"):
        async with Store.open("redis://127.0.0.1:1/0"):
            pass
