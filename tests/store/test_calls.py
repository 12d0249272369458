"""The store as a call log: the shipped suite on both databases, and what only this one promises."""

import msgspec
import pytest
from sqlalchemy import text

from rollyard.core.call import Reply, ids
from rollyard.core.errors import ConfigError
from rollyard.core.message import Message, Text
from rollyard.store import Store
from rollyard.testing.call_log import cases, commit_all, conversation
from rollyard.testing.pytest_adapter import conformance, hold
from rollyard.testing.suite import run_case

pytestmark = pytest.mark.anyio


@conformance(cases())
async def test_the_store_is_a_call_log(case, store):
    hold(await run_case(case, store))


async def test_a_message_that_comes_again_in_another_sequence_is_kept_once(store):
    t, added = conversation("r1", 4)
    again = msgspec.structs.replace(added[-1][1], id="again", tools=(), tools_digest=b"other", raw=b"")
    forked = t.add(
        again, Reply(message=Message("assistant", (Text("x"),)), prompt_ids=ids([9]), completion_ids=ids([9]))
    )
    assert len(forked.nodes) == 9
    await commit_all(store, [*added, (forked, again)])
    query = text("SELECT count(*), count(message) FROM nodes")
    rows, messages = await store.database.read(lambda connection: connection.execute(query).one())
    assert (rows, messages) == (9 + 9, 9 + 1)
    assert (await store.trajectory("r1")).nodes == t.nodes


async def test_places_that_cannot_hold_a_store_are_refused(tmp_path):
    for where in (":memory:", "redis://x", tmp_path / "no" / "runs.db"):
        with pytest.raises(ConfigError):
            async with Store.open(where):
                pass
