"""What any `CallLog` must do for the gate: the cases that the built-in store passes on both of its databases.

`fixture` is an open, empty log. Durability past SIGKILL cannot be shown from inside one process; `tests/store` does that.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array

import msgspec

from rollyard.core.call import Call, Reply, VersionSpan, floats, ids
from rollyard.core.delta import Delta
from rollyard.core.errors import ConfigError, SessionClosed, StoreError
from rollyard.core.message import Message, Text, ToolCall, ToolResult, ToolSpec, tools_digest
from rollyard.core.node import Added
from rollyard.core.protocols import CallLog, SessionRecord
from rollyard.testing.suite import Case, case, check
from rollyard.trajectory.trajectory import Trajectory

_TOOLS = (ToolSpec("sh", "run"),)


def conversation(rollout_id: str, turns: int, *, pad: int = 0) -> tuple[Trajectory, list[tuple[Added, Call]]]:
    """A growing conversation, placed; gives the trajectory and what each call added."""
    trajectory = Trajectory(rollout_id)
    messages = [Message("system", (Text("be good"),)), Message("user", (Text("go \0 on \u2028"),))]
    prompt = [1, 2, 2**31 - 1]
    out: list[tuple[Added, Call]] = []
    for turn in range(turns):
        answer = Message("assistant", (Text("ok"), ToolCall(f"t{turn}", "sh", f'{{"n": {turn}}}')))
        call = Call(
            id=f"{rollout_id}-c{turn}",
            rollout_id=rollout_id,
            dialect="chat",
            model="m",
            messages=tuple(messages),
            tools=_TOOLS,
            tools_digest=tools_digest(_TOOLS),
            raw=b'{"messages":[' + b"y" * pad + b"x" * (2000 + 30 * turn) + b"]}",
        )
        reply = Reply(
            message=answer,
            prompt_ids=ids(prompt),
            completion_ids=ids((100 + turn, 7)),
            logprobs=floats((-0.1, -1 / 3)),
            capture="tokens",
            spans=(VersionSpan(turn, 0, 2),),
            raw=b'{"answer": %d}' % turn,
        )
        out.append((trajectory.add(call, reply), call))
        messages += [answer, Message("tool", (ToolResult(f"t{turn}", (Text("done"),)),))]
        prompt = [*prompt, 100 + turn, 7, 8, 9]
    return trajectory, out


async def commit_all(log: CallLog, added: list[tuple[Added, Call]]) -> None:
    for one, _ in added:
        await log.commit(one.record, one.nodes, one.blobs)


@case("L1", "gives back every record and node exactly")
async def exact(log: CallLog) -> None:
    trajectory, added = conversation("r1", 6)
    await commit_all(log, added)
    again = Trajectory.restore("r1", *await log.load_calls("r1"))
    check(again.nodes == trajectory.nodes, "the nodes differ")
    check(again.records == trajectory.records, "the records differ")
    check(again.branches == trajectory.branches, "the branches differ")
    check(isinstance(again.branches[0].ids, array), "ids are not packed")


@case("L2", "gives back every body exactly, also one that was kept as a difference")
async def bodies(log: CallLog) -> None:
    _, added = conversation("r1", 30, pad=100_000)
    await commit_all(log, added)
    check(any(isinstance(blob, Delta) for one, _ in added for blob in one.blobs.values()), "nothing was a difference")
    for one, call in added:
        check(await log.load_blob(one.record.raw_request, "r1") == call.raw, f"the body of {call.id} differs")
    tools = await log.load_blob(added[0][0].record.tools_digest, "r1")
    check(msgspec.msgpack.decode(tools, type=tuple[ToolSpec, ...]) == _TOOLS, "the tools differ")


@case("L3", "keeps a body once that two rollouts share")
async def shares(log: CallLog) -> None:
    body = b"the same" * 5000
    digest = hashlib.sha256(body).digest()
    for name in ("r1", "r2"):
        _, ((one, _),) = conversation(name, 1)
        await log.commit(one.record, one.nodes, {**one.blobs, digest: body})
    for name in ("r1", "r2"):
        check(await log.load_blob(digest, name) == body, "the body differs")


@case("L4", "takes calls of many rollouts at once")
async def concurrent(log: CallLog) -> None:
    rollouts = [conversation(f"r{n}", 3) for n in range(40)]
    await asyncio.gather(*(commit_all(log, added) for _, added in rollouts))
    for trajectory, _ in rollouts:
        records, _ = await log.load_calls(trajectory.rollout_id)
        check(tuple(records) == trajectory.records, f"{trajectory.rollout_id} is not whole")


@case("L5", "refuses calls of a closed session, and only those")
async def closed(log: CallLog) -> None:
    await log.save_session(SessionRecord(rollout_id="r0", key_hash=b"h", created_at=1.0))
    await log.close_session("r0", 2.0)
    rollouts = [conversation(f"r{n}", 1)[1] for n in range(20)]
    results = await asyncio.gather(*(commit_all(log, added) for added in rollouts), return_exceptions=True)
    check(isinstance(results[0], SessionClosed), f"a closed session took a call ({results[0]!r})")
    check(results[1:] == [None] * 19, "an open one did not")
    check(not (await log.load_calls("r0"))[0], "the refused call is there")


@case("L6", "commits a call once")
async def once(log: CallLog) -> None:
    _, added = conversation("r1", 1)
    await commit_all(log, added)
    try:
        await commit_all(log, added)
    except StoreError:
        return
    raise AssertionError("the second commit of one call was taken")


@case("L7", "gives back sessions with their settings and the first close")
async def sessions(log: CallLog) -> None:
    session = SessionRecord(rollout_id="r1", key_hash=b"\0hash", created_at=1.5, settings={"model": "m", "n": [1]})
    await log.save_session(session)
    check(list(await log.sessions()) == [session], "the session differs")
    await log.close_session("r1", 3.0)
    await log.close_session("r1", 4.0)
    check([found.closed_at for found in await log.sessions()] == [3.0], "the second close counted")
    for created_at in (session.created_at, 5.0):
        try:
            await log.save_session(msgspec.structs.replace(session, created_at=created_at))
        except SessionClosed:
            continue
        raise AssertionError("a closed session was opened again")


@case("L11", "does not mix the calls of two sessions")
async def one_session(log: CallLog) -> None:
    session = SessionRecord(rollout_id="r1", key_hash=b"first", created_at=1.5)
    another = msgspec.structs.replace(session, key_hash=b"second", created_at=2.5)
    await log.save_session(session)
    await log.save_session(another)  # the one before took no call
    await commit_all(log, conversation("r1", 1)[1])
    await log.save_session(msgspec.structs.replace(another, key_hash=b"third"))  # a new key
    try:
        await log.save_session(session)
    except ConfigError:
        check([found.key_hash for found in await log.sessions()] == [b"third"], "the refused session is there")
        return
    raise AssertionError("a session went on with another's calls")


@case("L8", "says that a body is missing")
async def missing(log: CallLog) -> None:
    try:
        await log.load_blob(b"nothing", "r1")
    except StoreError:
        return
    raise AssertionError("a body that was never kept was found")


@case("L9", "shows a rollout whole while it is being written")
async def snapshots(log: CallLog) -> None:
    _, added = conversation("r1", 120)
    writing = asyncio.create_task(commit_all(log, added))
    while not writing.done():
        Trajectory.restore("r1", *await log.load_calls("r1"))
    await writing
    check(len((await log.load_calls("r1"))[0]) == 120, "calls are missing")


@case("L10", "keeps an answer whose parent came late under that parent")
async def late(log: CallLog) -> None:
    _, added = conversation("r1", 2)
    trajectory = Trajectory("r2")
    pairs = [(call, one) for one, call in added]
    for call, one in reversed(pairs):
        answer = one.nodes[-1]
        whole = ids(range(3)) if call is pairs[0][0] else ids((0, 1, 2, 50, 51, 60))
        sampled = ids((50, 51)) if call is pairs[0][0] else ids((70,))
        reply = Reply(
            message=answer.message, prompt_ids=whole, completion_ids=sampled, logprobs=floats(-1.0 for _ in sampled)
        )
        moved = trajectory.add(msgspec.structs.replace(call, rollout_id="r2"), reply)
        await log.commit(moved.record, moved.nodes, moved.blobs)
    again = Trajectory.restore("r2", *await log.load_calls("r2"))
    check(len(again.branches) == 1, "the child is still a root")
    check(again.records == trajectory.records and again.nodes == trajectory.nodes, "the graph differs")


def cases() -> list[Case[CallLog]]:
    return [exact, bodies, shares, concurrent, closed, once, sessions, missing, snapshots, late]
