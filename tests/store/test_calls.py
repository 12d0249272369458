"""The gate's side of the store: what was committed comes back, exactly."""

import asyncio

import msgspec
import pytest
from sqlalchemy import text

from rollyard.core.call import Call, Reply, VersionSpan, floats, ids
from rollyard.core.errors import ConfigError, SessionClosed, StoreError
from rollyard.core.message import Message, Text, ToolCall, ToolResult, ToolSpec, tools_digest
from rollyard.core.protocols import SessionRecord
from rollyard.core.trajectory import Trajectory
from rollyard.store import Store

pytestmark = pytest.mark.anyio

TOOLS = (ToolSpec("sh", "run"),)


def conversation(rollout_id, turns, body=b""):
    """A growing conversation, placed; gives the trajectory and what each call added."""
    t = Trajectory(rollout_id)
    messages = [Message("system", (Text("be good"),)), Message("user", (Text("go \0 on"),))]
    prompt = [1, 2, 3]
    out = []
    for turn in range(turns):
        answer = Message("assistant", (Text("ok"), ToolCall(f"t{turn}", "sh", f'{{"n": {turn}}}')))
        completion = [100 + turn, 7]
        call = Call(
            id=f"{rollout_id}-c{turn}",
            rollout_id=rollout_id,
            dialect="chat",
            model="m",
            messages=tuple(messages),
            tools=TOOLS,
            tools_digest=tools_digest(TOOLS),
            raw=b'{"messages":[' + body + b"x" * (2000 + 30 * turn) + b"]}",
        )
        reply = Reply(
            message=answer,
            prompt_ids=ids(prompt),
            completion_ids=ids(completion),
            logprobs=floats([-0.1, -1 / 3]),
            capture="tokens",
            spans=(VersionSpan(turn, 0, 2),),
            raw=b'{"answer": %d}' % turn,
        )
        out.append((t.add(call, reply), call))
        messages += [answer, Message("tool", (ToolResult(f"t{turn}", (Text("done"),)),))]
        prompt = [*prompt, *completion, 8, 9]
    return t, out


async def test_a_trajectory_comes_back_as_it_was(store):
    t, added = conversation("r1", 6)
    for one, _ in added:
        await store.commit(one.record, one.nodes, one.blobs)
    again = await store.trajectory("r1")
    assert again.nodes == t.nodes
    assert again.records == t.records
    assert again.branches == t.branches
    for one, call in added:
        assert await store.load_blob(one.record.raw_request) == call.raw
    assert await store.load_blob(added[0][0].record.tools_digest)


async def test_a_message_that_comes_again_in_another_sequence_is_kept_once(store):
    t, added = conversation("r1", 4)
    again = msgspec.structs.replace(added[-1][1], id="again", tools=(), tools_digest=b"other", raw=b"")
    forked = t.add(
        again, Reply(message=Message("assistant", (Text("x"),)), prompt_ids=ids([9]), completion_ids=ids([9]))
    )
    assert len(forked.nodes) == 9
    for one in [*(one for one, _ in added), forked]:
        await store.commit(one.record, one.nodes, one.blobs)
    query = text("SELECT count(*), count(message) FROM nodes")
    rows, messages = await store._database.read(lambda connection: connection.execute(query).one())
    assert (rows, messages) == (9 + 9, 9 + 1)
    assert (await store.trajectory("r1")).nodes == t.nodes


async def test_a_large_body_comes_back_whole(store):
    _, added = conversation("r1", 30, body=b"y" * 100_000)
    for one, _ in added:
        await store.commit(one.record, one.nodes, one.blobs)
    for one, call in added:
        assert await store.load_blob(one.record.raw_request) == call.raw


async def test_calls_of_many_rollouts_committed_at_once_are_all_there(store):
    rollouts = [conversation(f"r{n}", 3) for n in range(40)]

    async def commit_all(added):
        for one, _ in added:
            await store.commit(one.record, one.nodes, one.blobs)

    await asyncio.gather(*(commit_all(added) for _, added in rollouts))
    for t, _ in rollouts:
        assert (await store.trajectory(t.rollout_id)).records == t.records


async def test_a_rollout_read_while_it_is_written_is_always_whole(store):
    _, added = conversation("r1", 120)
    writing = asyncio.create_task(write_slowly(store, added))
    seen = 0
    while not writing.done():
        records = (await store.trajectory("r1")).records
        assert len(records) >= seen
        seen = len(records)
    await writing
    assert len((await store.trajectory("r1")).records) == 120


async def write_slowly(store, added):
    for one, _ in added:
        await store.commit(one.record, one.nodes, one.blobs)


async def test_one_refused_commit_does_not_hurt_its_neighbours(store):
    await store.save_session(SessionRecord(rollout_id="r0", key_hash=b"h", created_at=1.0))
    await store.close_session("r0", 2.0)
    rollouts = [conversation(f"r{n}", 1) for n in range(20)]
    results = await asyncio.gather(
        *(store.commit(a[0][0].record, a[0][0].nodes, a[0][0].blobs) for _, a in rollouts), return_exceptions=True
    )
    assert isinstance(results[0], SessionClosed)
    assert results[1:] == [None] * 19
    assert (await store.load_calls("r0")) == ([], [])
    assert len((await store.load_calls("r7"))[0]) == 1


async def test_a_call_is_committed_once(store):
    _, ((one, _),) = conversation("r1", 1)
    await store.commit(one.record, one.nodes, one.blobs)
    with pytest.raises(StoreError):
        await store.commit(one.record, one.nodes, one.blobs)


async def test_sessions_come_back_with_their_settings_and_the_first_close(store):
    session = SessionRecord(rollout_id="r1", key_hash=b"\0hash", created_at=1.5, settings={"model": "m", "n": [1]})
    await store.save_session(session)
    assert list(await store.sessions()) == [session]
    await store.close_session("r1", 3.0)
    await store.close_session("r1", 4.0)
    assert [s.closed_at for s in await store.sessions()] == [3.0]


async def test_a_missing_body_is_an_error_of_the_store(store):
    with pytest.raises(StoreError):
        await store.load_blob(b"nothing")


async def test_places_that_cannot_hold_a_store_are_refused(tmp_path):
    for where in (":memory:", "redis://x", tmp_path / "no" / "runs.db"):
        with pytest.raises(ConfigError):
            async with Store.open(where):
                pass
