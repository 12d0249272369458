"""Rollouts with every feature the exports must carry, as the gate and `runs` would leave them in a store."""

import msgspec

from rollyard.core.call import Call, Reply, Sampling, TokenText, Usage, floats, ids
from rollyard.core.message import Image, Message, Text, Thinking, ToolCall, ToolResult, ToolSpec, tools_digest
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.trajectory.trajectory import Trajectory

TOOLS = (ToolSpec("sh", "run a command", '{"type": "object"}'), ToolSpec("task", "start a sub-agent"))
SYSTEM = Message("system", (Text("be good"),))
USER = Message("user", (Text("fix it"), Image("image/png", "aGk=")))


def call(id, rollout_id, *messages, tools=TOOLS, **fields):
    body = msgspec.json.encode({"messages": [m.text for m in messages], "pad": "x" * 1500})
    return Call(
        id=f"{rollout_id}-{id}",
        rollout_id=rollout_id,
        dialect="chat",
        model="m",
        messages=messages,
        tools=tools,
        tools_digest=tools_digest(tools),
        sampling=Sampling(temperature=fields.pop("temperature", 1.0)),
        raw=body,
        received_at=100.0,
        **fields,
    )


def reply(message, prompt, completion, **fields):
    raw = {"choices": [{"token_ids": completion}], "prompt_token_ids": prompt}
    return Reply(
        message=message,
        prompt_ids=ids(prompt),
        completion_ids=ids(completion),
        logprobs=floats([-0.25] * len(completion)),
        tokens=tuple(TokenText(f"<{n}>", -0.25) for n in completion),
        capture="tokens",
        usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(completion)),
        version_start=4,
        version_end=4,
        model="served",
        prompt_source="engine",
        raw=msgspec.json.encode(raw),
        finished_at=101.5,
        **fields,
    )


def full(rollout_id, temperature=1.0):
    """A conversation with tools, a title, a sub-agent, a failed call, a compaction; gives the trajectory and its adds."""
    t = Trajectory(rollout_id)
    asks = Message(
        "assistant",
        (Thinking("hm"), Text("looking"), ToolCall("a", "sh", '{"cmd": "ls"}'), ToolCall("b", "task", "not json")),
    )
    results = (
        Message("tool", (ToolResult("a", (Text("file"),)),)),
        Message("tool", (ToolResult("b", (Text("found"),)),)),
    )
    sub = (Message("system", (Text("you search"),)), Message("user", (Text("find"),)))
    done = Message("assistant", (Text("done"),))
    adds = [
        t.add(
            call("title", rollout_id, Message("user", (Text("name it"),)), tools=(), kind="auxiliary"),
            reply(Message("assistant", (Text("A title"),)), [50], [51]),
        ),
        t.add(call("c1", rollout_id, SYSTEM, USER, thread="main"), reply(asks, [1, 2, 3], [4, 5])),
        t.add(
            call("s1", rollout_id, *sub, kind="subagent", thread="s", parent_thread="main", tools=()),
            reply(Message("assistant", (Text("found"),)), [60, 61], [62]),
        ),
        t.add(call("f", rollout_id, SYSTEM, USER, asks, *results, thread="main"), None, error="upstream said 500"),
        t.add(
            call("c2", rollout_id, SYSTEM, USER, asks, *results, thread="main"), reply(done, [1, 2, 3, 4, 5, 6], [7, 8])
        ),
        t.add(
            call("k", rollout_id, Message("user", (Text("sum up"),)), kind="compaction", thread="main", tools=()),
            reply(Message("assistant", (Text("we did x"),)), [70], [71]),
        ),
        t.add(
            call(
                "c3",
                rollout_id,
                SYSTEM,
                Message("user", (Text("so far: we did x"),)),
                thread="main",
                temperature=temperature,
            ),
            reply(Message("assistant", (Text("ok"),)), [80, 81], [82], finish="length"),
        ),
    ]
    return t, adds


async def keep(store, rollout_id, run_id="run1", **fields):
    """Commit a full rollout the way a run does."""
    t, adds = full(rollout_id, fields.pop("temperature", 1.0))
    for added in adds:
        await store.commit(added.record, added.nodes, added.blobs)
    base = {"verdict": Verdict(reward=0.5, parts={"tests": 0.5}), "calls": len(adds), "agent": "pi", "group_id": "g"}
    rollout = Rollout(id=rollout_id, run_id=run_id, task=Task(id="t1", instruction="fix it"), **{**base, **fields})
    await store.commit_rollout(rollout)
    return msgspec.structs.replace(rollout, trajectory=t)
