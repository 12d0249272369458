"""What is particular to Redis: it must run scripts, and runs are not kept there."""

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rollyard.core.errors import ConfigError
from rollyard.core.plane import AdmissionTerms
from rollyard.plane.storage.open import open_plane
from rollyard.store import Store
from tests.plane.writers import instance

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


@pytest.mark.adversarial
@pytest.mark.parametrize("plane_url", ["redis-least"], indirect=True)
async def test_a_user_with_the_rights_of_a_plane_reaches_no_other_keys(plane_url):
    """That these rights are enough is what `test_storage.py` shows."""
    async with open_plane(plane_url) as (store, _), Redis.from_url(plane_url.partition("?")[0]) as client:
        await store.begin(instance("ann"), terms=AdmissionTerms(), request=None)
        attacks = ("GET others", "SET others x", "KEYS *", "FLUSHALL", "FLUSHDB", "CONFIG GET *", "ACL LIST", "SHUTDOWN",
                   "REPLICAOF no one", "MONITOR", "MODULE LIST", "SCRIPT FLUSH", "PUBLISH c x",
                   "EVAL return(redis.call('get','others')) 0", "EVAL return(redis.call('flushall')) 0")  # fmt: skip
        for attack in attacks:
            with pytest.raises(ResponseError, match=r"permissions|can't access|can't run"):
                await client.execute_command(*attack.split(" "))
