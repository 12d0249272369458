"""What is particular to Redis: a change without scripts survives its writer, and runs are not kept there."""

import msgspec
import pytest
from redis.exceptions import ResponseError

from rollyard.core.errors import ConfigError
from rollyard.core.plane import AdmissionTerms
from rollyard.plane.storage.open import open_plane
from rollyard.store import Store
from tests.plane.writers import instance

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("plane_url", ["redis-no-scripts"], indirect=True)
async def test_without_scripts_the_next_writer_finishes_what_a_dead_one_began(plane_url):
    """The journal is all that a writer left that died between writing it and doing it."""
    async with open_plane(plane_url) as (store, _):
        changer = store._changer
        assert not changer.scripted
        new, _ = await store.begin(instance("ann"), terms=AdmissionTerms(), request=None)
        dead = type(changer)(store._client, changer._lock.removesuffix("lock"), scripted=False)

        async def stops(commands):
            raise SystemExit

        dead._apply = stops
        with pytest.raises(SystemExit):
            await dead(lambda change: store._rows.end(change, new.id, "failed", 2.0, "dead writer"))
        begun = msgspec.json.decode(await store._client.get(changer._journal))
        await store._client.execute_command(*begun[0])  # it may also have died in the middle
        assert (await store.usage("ann")).used == 1
        await store.begin(instance("bob"), terms=AdmissionTerms(), request=None)
        assert (await store.usage("ann")).used == 0
        assert (await store.get_instance(new.id)).state == "failed"
        assert await store._client.get(changer._journal) is None


async def test_runs_on_redis_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="need SQL"):
        async with Store.open("redis://127.0.0.1:1/0"):
            pass


@pytest.mark.adversarial
@pytest.mark.parametrize("plane_url", ["redis-least"], indirect=True)
async def test_a_user_with_the_rights_of_a_plane_reaches_no_other_keys(plane_url):
    """That these rights are enough is what `test_storage.py` shows."""
    async with open_plane(plane_url) as (store, _):
        await store.begin(instance("ann"), terms=AdmissionTerms(), request=None)
        attacks = ("GET others", "SET others x", "KEYS *", "FLUSHALL", "FLUSHDB", "CONFIG GET *", "ACL LIST", "SHUTDOWN",
                   "REPLICAOF no one", "MONITOR", "MODULE LIST", "SCRIPT FLUSH", "PUBLISH c x",
                   "EVAL return(redis.call('get','others')) 0", "EVAL return(redis.call('flushall')) 0")  # fmt: skip
        for attack in attacks:
            with pytest.raises(ResponseError, match=r"permissions|can't access|can't run"):
                await store._client.execute_command(*attack.split(" "))
