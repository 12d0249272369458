"""Two fixed rollouts and one without a reward, from core values: what every adapter's golden file is made of.

`linear`: two calls, a tool result between them, a bridge's inserted token, new weights in the middle of the second answer.
`branchy`: an agent that forks after its first answer, calls a sub-agent, and compacts its history.
"""

from rollyard.core.call import Call, Reply, Sampling, VersionSpan, floats, ids
from rollyard.core.message import Message, Text, Thinking, ToolCall, ToolResult
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.trajectory.trajectory import Trajectory

SYSTEM = Message("system", (Text("you fix code"),))
USER = Message("user", (Text("fix it"),))
TASK = Task(id="fix", instruction="fix it")


def said(text, *calls, thinking=None):
    parts = ((Thinking(thinking),) if thinking else ()) + ((Text(text),) if text else ())
    return Message("assistant", (*parts, *(ToolCall(id, "sh", arguments) for id, arguments in calls)))


def result(id, text):
    return Message("tool", (ToolResult(id, (Text(text),)),))


def call(rollout, id, *messages, **fields):
    return Call(
        id=id, rollout_id=rollout, dialect="chat", model="policy", messages=messages, received_at=10.0, **fields
    )


def reply(message, prompt, completion, **fields):
    base = {"capture": "tokens", "version_start": 3, "version_end": 3, "sampling": Sampling(temperature=0.7)}
    return Reply(
        message=message,
        prompt_ids=ids(prompt),
        completion_ids=ids(completion),
        logprobs=floats(-0.5 - index / 8 for index in range(len(completion))),
        **{**base, **fields},
    )


def rollout(id, trajectory, reward, attempt):
    verdict = Verdict(reward=reward) if reward is not None else Verdict(status="failed")
    return Rollout(id=id, task=TASK, group_id="g1", attempt=attempt, verdict=verdict, trajectory=trajectory)


def linear():
    t = Trajectory("ro-linear")
    first = said("look", ("k1", '{"cmd": "ls"}'), thinking="hm")
    t.add(call("ro-linear", "a1", SYSTEM, USER), reply(first, [1, 2, 3], [10, 11], finish="tool_calls"))
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))
    t.add(
        call("ro-linear", "a2", SYSTEM, USER, first, result("k1", "main.c")),
        reply(
            said("done"),
            [1, 2, 3, 10, 11, 20, 21],
            [12, 13, 14],
            inserted=((5, 6),),
            spans=spans,
            version_end=4,
            finish="length",
        ),
    )
    return rollout("ro-linear", t, 1.0, 0)


def branchy():
    name, t = "ro-branchy", Trajectory("ro-branchy")
    first = said("", ("k1", '{"task":"tests"}'))
    t.add(call(name, "b1", SYSTEM, USER), reply(first, [1, 2, 3], [30, 31], finish="tool_calls"))
    helper = Message("system", (Text("you run tests"),))
    t.add(
        call(name, "b2", helper, Message("user", (Text("tests"),)), kind="subagent", thread="s", parent_thread="m"),
        reply(said("green"), [5, 6], [40, 41]),
    )
    t.add(call(name, "b3", SYSTEM, USER, first, result("k1", "green")), reply(said("ok"), [1, 2, 3, 30, 31, 22], [32]))
    other = Message("user", (Text("and again"),))
    t.add(call(name, "b4", SYSTEM, USER, first, other), reply(said("again"), [1, 2, 3, 30, 31, 23, 24], [33, 34]))
    summary = Message("user", (Text("so far: green"),))
    t.add(
        call(name, "b5", SYSTEM, summary, kind="compaction"),
        reply(said("finished"), [1, 9, 9], [35], version_start=4, version_end=4),
    )
    return rollout(name, t, 0.0, 1)


def unscored():
    t = Trajectory("ro-none")
    t.add(call("ro-none", "n1", SYSTEM, USER), reply(said("?"), [1, 2, 3], [50]))
    return rollout("ro-none", t, None, 2)


def unprovable():
    t = Trajectory("ro-text")
    t.add(call("ro-text", "x1", SYSTEM, USER), Reply(message=said("?")))
    return rollout("ro-text", t, 1.0, 3)
