"""Where a call lands in the graph, for what real agents send back."""

from array import array

import pytest

from rollyard.core.call import Call, Reply, Usage, VersionSpan, floats, ids
from rollyard.core.message import Message, Text, Thinking, ToolCall, ToolResult, ToolSpec, tools_digest
from rollyard.trajectory.trajectory import Trajectory
from tests.memory import trace_memory

SYSTEM = Message("system", (Text("you are a coder"),))
USER = Message("user", (Text("fix the bug"),))
TOOLS = (ToolSpec("sh", "run"),)


def call(id, *messages, **fields):
    tools = fields.pop("tools", TOOLS)
    return Call(
        id=id,
        rollout_id="r1",
        dialect="chat",
        model="m",
        messages=messages,
        tools=tools,
        tools_digest=tools_digest(tools),
        **fields,
    )


def reply(message, prompt=None, completion=None, **fields):
    if isinstance(message, str):
        message = Message("assistant", (Text(message),))
    return Reply(
        message=message,
        prompt_ids=None if prompt is None else ids(prompt),
        completion_ids=None if completion is None else ids(completion),
        logprobs=None if completion is None else floats([-0.5] * len(completion)),
        capture="tokens" if completion is not None else "text",
        **fields,
    )


def asks(*calls, text="", thinking=None):
    parts = ((Thinking(thinking),) if thinking else ()) + ((Text(text),) if text else ())
    return Message("assistant", (*parts, *(ToolCall(id, "sh", arguments) for id, arguments in calls)))


def result(id, text="ok"):
    return Message("tool", (ToolResult(id, (Text(text),)),))


def first_turn(answer, **fields):
    t = Trajectory("r1")
    t.add(call("c1", SYSTEM, USER), reply(answer, [1, 2, 3], [4, 5], **fields))
    return t


def test_a_continuing_call_adds_only_what_is_new():
    t = first_turn(asks(("a", '{"cmd": "ls"}')))
    echo = asks(("a", '{"cmd":"ls"}'))
    added = t.add(call("c2", SYSTEM, USER, echo, result("a")), reply("done", [1, 2, 3, 4, 5, 6], [7]))
    assert added.record.edge == "extends"
    assert added.record.parent_call_id == "c1"
    assert added.record.break_reason is None
    assert [node.message.role for node in added.nodes] == ["tool", "assistant"]
    assert [list(node.ids) for node in added.nodes] == [[6], [7]]
    (branch,) = t.branches
    assert list(branch.ids) == [1, 2, 3, 4, 5, 6, 7]
    assert list(branch.mask) == [0, 0, 0, 1, 1, 0, 1]
    assert list(branch.logprobs) == [0, 0, 0, -0.5, -0.5, 0, -0.5]
    assert branch.roles == ("system", "user", "assistant", "tool", "assistant")
    assert branch.call_ids == ("c1", "c2")
    assert branch.kind == "agent"


def test_match_names_the_continued_call_and_the_new_messages():
    t = first_turn(asks(("a", '{"cmd": "ls"}'), thinking="hm"))
    found = t.match(call("c2", SYSTEM, USER, asks(("a", '{"cmd":"ls"}')), result("a")))
    parent = found.continues
    assert parent is not None and found.reason is None
    assert (parent.call_id, parent.new, parent.answer.thinking) == ("c1", (result("a"),), "hm")
    assert (list(parent.ids()), parent.sampled) == ([1, 2, 3, 4, 5], 2)
    again = t.match(call("c3", SYSTEM, USER))
    assert again.continues is None and again.reason is None
    other = t.match(call("c4", SYSTEM, Message("user", (Text("another task"),))))
    assert other.continues is None and other.reason == "new_root"


def test_split_parallel_calls_are_one_answer():
    """goose sends assistant/tool/assistant/tool for one answer with two tool calls."""
    t = first_turn(asks(("a", "{}"), ("b", "{}"), text="two"))
    split = (asks(("a", "{}"), text="two"), result("a"), asks(("b", "{}")), result("b"))
    parent = t.match(call("x", SYSTEM, USER, *split)).continues
    assert parent is not None and parent.call_id == "c1"
    assert parent.new == (result("a"), result("b"))
    half = t.match(call("y", SYSTEM, USER, *split[:2]))
    assert half.continues is None and half.reason == "assistant_rewritten"
    second = t.add(call("c2", SYSTEM, USER, *split), reply(asks(("c", "{}")), [1, 2, 3, 4, 5, 6], [7]))
    assert [node.message.role for node in second.nodes] == ["tool", "tool", "assistant"]
    third = t.add(
        call("c3", SYSTEM, USER, *split, asks(("c", "{}")), result("c")), reply("end", [1, 2, 3, 4, 5, 6, 7, 8], [9])
    )
    assert third.record.parent_call_id == "c2"
    assert len(t.branches) == 1


def test_an_answer_that_came_back_edited_is_known_by_its_tool_call_ids_and_place():
    answer = asks(("a", '{"cmd": "cd /app && ls"}'), ("b", "{}"), text="  let me see  ")
    t = first_turn(answer)

    def found(*echo):
        return t.match(call("c2", SYSTEM, USER, *echo))

    for echo in (
        asks(("a", '{"cmd": "ls"}'), ("b", "{}"), text="let me see"),
        asks(("a", ""), ("b", "{}")),
        asks(("a", "not json"), ("b", '{"more": 1}'), text="other words"),
    ):
        parent = found(echo, result("a"), result("b")).continues
        assert parent is not None and (parent.call_id, parent.edited) == ("c1", True)
        assert (parent.answer, parent.new) == (answer, (result("a"), result("b")))
    same = found(
        asks(("a", '{"cmd":"cd /app && ls"}'), ("b", ""), text="  let me see "), result("a"), result("b")
    ).continues
    assert same is not None and not same.edited
    split = (asks(("a", '{"cmd": "ls"}')), result("a"), asks(("b", "{}")), result("b"))
    parts = found(*split).continues
    assert parts is not None and parts.edited


def test_an_answer_with_other_calls_or_among_other_neighbours_is_not_gone_on_from():
    t = first_turn(asks(("a", '{"cmd": "ls"}'), ("b", "{}")))
    for echo in (
        asks(("a", '{"cmd": "pwd"}')),
        asks(("b", "{}"), ("a", "{}")),
        asks(("a", "{}"), ("b", "{}"), ("c", "{}")),
        Message("assistant", (ToolCall("a", "other", "{}"), ToolCall("b", "sh", "{}"))),
    ):
        found = t.match(call("c2", SYSTEM, USER, echo, result("a"), result("b")))
        assert (found.continues, found.reason) == (None, "assistant_rewritten")
    edited = asks(("a", "{}"), ("b", "{}"))
    other_user = Message("user", (Text("fix another bug"),))
    assert t.match(call("c3", SYSTEM, other_user, edited, result("a"), result("b"))).continues is None
    t.add(call("c4", SYSTEM, USER, edited, result("a"), result("b")), reply(asks(("d", "{}"))))
    cleared = t.match(
        call("c5", SYSTEM, USER, edited, result("a", "cleared"), result("b"), asks(("d", "{}")), result("d"))
    )
    assert cleared.continues is None


def test_a_retry_of_a_root_that_became_other_tokens_is_a_retry():
    """A template may put the time into its prompt: nothing in the history was edited."""
    t = first_turn(asks(("a", "{}")))
    again = t.add(call("c2", SYSTEM, USER), reply("b", [1, 9, 3], [4])).record
    assert (again.edge, again.parent_call_id, again.break_reason) == ("retry_of", "c1", "bridge_unproven")
    assert again.first_mismatch == 1
    same = t.add(call("c3", SYSTEM, USER), reply("c", [1, 2, 3], [4])).record
    assert (same.edge, same.parent_call_id, same.break_reason) == ("retry_of", "c1", None)
    tools = t.add(call("c4", SYSTEM, USER, tools=()), reply("d", [8, 2, 3], [4])).record
    assert (tools.edge, tools.break_reason) == ("root", "tools_changed")


def test_another_conversation_under_the_same_system_prompt_is_a_new_root():
    """An agent's side call (a title, a quota check) comes before its work and edits nothing of it."""
    t = Trajectory("r1")
    t.add(call("c1", SYSTEM, Message("user", (Text("a title, please"),)), kind="auxiliary"), reply("Bug", [1, 2], [3]))
    failed = t.add(call("c2", SYSTEM, USER, raw=b"body"), None, error="502").record
    root = t.add(call("c3", SYSTEM, USER, raw=b"body"), reply("done", [1, 5], [6])).record
    assert (failed.break_reason, root.edge, root.break_reason) == ("new_root", "retry_of", None)
    other = t.add(call("c4", SYSTEM, Message("user", (Text("and now this"),))), reply("done", [1, 7], [6])).record
    assert (other.edge, other.break_reason) == ("root", "new_root")


def test_a_system_message_put_into_the_history_is_stepped_over():
    t = first_turn(asks(("a", "{}")))
    t.add(call("c2", SYSTEM, USER, asks(("a", "{}")), result("a")), reply(asks(("b", "{}"))))
    note = Message("system", (Text("a reminder"),))
    request = call("c3", SYSTEM, USER, note, asks(("a", "{}")), result("a"), asks(("b", "{}")), result("b"))
    found = t.match(request)
    assert (found.continues, found.reason) == (None, "history_edited")
    assert t.add(request, reply("x")).record.parent_call_id == "c2"


def test_a_system_message_that_went_away_is_stepped_over():
    note = Message("system", (Text("a reminder"),))
    t = Trajectory("r1")
    t.add(call("c1", SYSTEM, USER), reply(asks(("a", "{}"))))
    t.add(call("c2", SYSTEM, USER, asks(("a", "{}")), note, result("a")), reply(asks(("b", "{}"))))
    request = call("c3", SYSTEM, USER, asks(("a", "{}")), result("a"), asks(("b", "{}")), result("b"))
    found = t.match(request)
    assert (found.continues, found.reason) == (None, "history_edited")
    assert t.add(request, reply("x")).record.parent_call_id == "c2"


def test_a_turn_whose_ids_nobody_knows_does_not_hide_the_exact_ones_after_it():
    """An answer without ids in the middle: the next prompt is rendered in full, and the one after goes on from its ids."""
    t = Trajectory("r1")
    base = (SYSTEM, USER, asks(("a", "{}")), result("a"))
    t.add(call("c1", SYSTEM, USER), reply(asks(("a", "{}")), [1, 2, 3]))
    first = t.match(call("c2", *base)).continues
    assert first is not None and (first.call_id, first.deltas) == ("c1", None)
    t.add(call("c2", *base), reply(asks(("b", "{}")), [1, 2, 3, 40, 50, 6], [7]))
    request = call("c3", *base, asks(("b", "{}")), result("b"))
    found = t.match(request)
    assert found.continues is not None
    assert (found.continues.call_id, list(found.continues.ids())) == ("c2", [1, 2, 3, 40, 50, 6, 7])
    added = t.add(request, reply("x", [1, 2, 3, 40, 50, 6, 7, 8], [9]), match=found)
    assert (added.record.parent_call_id, added.record.break_reason) == ("c2", None)


def test_a_match_from_before_another_call_was_added_is_made_anew():
    t = first_turn(asks(("a", "{}")))
    base = (SYSTEM, USER, asks(("a", "{}")), result("a"))
    request = call("c3", *base, asks(("b", "{}")), result("b"))
    early = t.match(request)
    assert early.continues is None
    t.add(call("c2", *base), reply(asks(("b", "{}")), [1, 2, 3, 4, 5, 6], [7]))
    added = t.add(request, reply("x", [1, 2, 3, 4, 5, 6, 7, 8], [9]), match=early)
    assert (added.record.edge, added.record.parent_call_id, added.record.break_reason) == ("extends", "c2", None)


def test_the_same_words_as_other_tokens_fork_and_say_so():
    t = first_turn(asks(("a", "{}")))
    added = t.add(call("c2", SYSTEM, USER, asks(("a", "{}")), result("a")), reply("done", [1, 2, 3, 45, 6], [7]))
    assert (added.record.edge, added.record.break_reason, added.record.first_mismatch) == ("root", "bridge_unproven", 3)
    assert sorted(list(b.ids) for b in t.branches) == [[1, 2, 3, 4, 5], [1, 2, 3, 45, 6, 7]]


def test_stripped_thinking_is_named():
    t = first_turn(asks(("a", "{}"), thinking="hm"))
    added = t.add(call("c2", SYSTEM, USER, asks(("a", "{}")), result("a")), reply("x", [1, 2, 3, 5, 6], [7]))
    assert added.record.break_reason == "thinking_stripped"


def test_rewritten_answers_are_named():
    t = first_turn(asks(("a", '{"x": 1}')))
    added = t.add(call("c2", SYSTEM, USER, asks(("a", '{"x":1}')), result("a")), reply("x", [1, 2, 3, 9, 6], [7]))
    assert added.record.break_reason == "assistant_rewritten"
    t = first_turn("hello")
    echo = Message("assistant", (Text("good bye"),))
    added = t.add(call("c2", SYSTEM, USER, echo, USER), reply("x", [1, 2, 3, 9, 6], [7]))
    assert added.record.break_reason == "assistant_rewritten"


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ((Message("system", (Text("another day"),)), USER), TOOLS, "system_changed"),
        ((SYSTEM, USER), (ToolSpec("other"),), "tools_changed"),
        ((SYSTEM, Message("user", (Text("fix it!"),))), TOOLS, "history_edited"),
        ((Message("system", (Text("title"),)), Message("user", (Text("name this"),))), (), "new_root"),
    ],
)
def test_what_changed_in_the_history_is_named(messages, tools, reason):
    for tokens in (True, False):
        t = Trajectory("r1")
        answer = asks(("a", "{}"))
        t.add(call("c1", SYSTEM, USER), reply(answer, *([[1, 2, 3], [4, 5]] if tokens else ())))
        tail = (answer, result("a")) if reason != "new_root" else ()
        added = t.add(
            call("c2", *messages, *tail, tools=tools), reply("x", *([[8, 8, 8, 8, 8, 8], [9]] if tokens else ()))
        )
        assert (added.record.edge, added.record.break_reason) == ("root", reason)
        assert len(t.branches) == 2


def test_changed_tools_with_an_exact_token_prefix_still_extend():
    t = first_turn(asks(("a", "{}")))
    added = t.add(
        call("c2", SYSTEM, USER, asks(("a", "{}")), result("a"), tools=()), reply("x", [1, 2, 3, 4, 5, 6], [7])
    )
    assert added.record.parent_call_id == "c1"
    (branch,) = t.branches
    assert list(branch.ids) == [1, 2, 3, 4, 5, 6, 7]


def test_a_repeated_request_is_a_sibling_and_the_continued_one_is_kept():
    t = first_turn("first")
    again = t.add(call("c2", SYSTEM, USER), reply("second", [1, 2, 3], [6]))
    assert (again.record.edge, again.record.parent_call_id) == ("retry_of", "c1")
    assert [node.sampled for node in again.nodes] == [True]
    assert [b.kind for b in t.branches] == ["agent", "discarded"]
    echo = Message("assistant", (Text("first"),))
    t.add(call("c3", SYSTEM, USER, echo, USER), reply("third", [1, 2, 3, 4, 5, 7], [8]))
    kinds = {b.call_ids: b.kind for b in t.branches}
    assert kinds == {("c1", "c3"): "agent", ("c2",): "discarded"}


def test_a_failed_call_leaves_a_record_and_its_body_and_the_retry_says_so():
    t = Trajectory("r1")
    failed = t.add(call("c1", SYSTEM, USER, raw=b"{body}"), None, error="upstream said 500")
    assert failed.nodes == () and failed.record.leaf is None and failed.record.error == "upstream said 500"
    assert list(failed.blobs.values())[0] == b"{body}"
    second = t.add(call("c2", SYSTEM, USER, raw=b"{body}"), reply("ok", [1], [2]))
    assert (second.record.edge, second.record.parent_call_id) == ("retry_of", "c1")
    assert len(t.branches) == 1


def test_a_shared_answer_trains_in_one_branch_only():
    t = first_turn(asks(("a", "{}")))
    base = (SYSTEM, USER, asks(("a", "{}")))
    t.add(call("c2", *base, result("a", "one")), reply("x", [1, 2, 3, 4, 5, 6], [7]))
    t.add(call("c3", *base, result("a", "two")), reply("y", [1, 2, 3, 4, 5, 8], [9]))
    assert [list(b.mask) for b in t.branches] == [[0, 0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0, 1]]


def test_a_compaction_starts_a_sequence_that_names_its_origin():
    t = first_turn(asks(("a", "{}")))
    t.add(
        call("c2", Message("user", (Text("summarise"),)), tools=(), kind="compaction"),
        reply("we did x", [10, 11], [12]),
    )
    added = t.add(call("c3", SYSTEM, Message("user", (Text("so far: we did x"),))), reply("go on", [13, 14], [15]))
    assert (added.record.edge, added.record.parent_call_id) == ("compacted_from", "c2")
    assert added.record.break_reason == "compaction"
    assert [b.kind for b in t.branches] == ["agent", "compaction", "agent"]


def test_a_restart_that_quotes_the_last_answer_is_a_compaction():
    summary = "The user wants the bug fixed. " * 20
    t = first_turn(summary)
    added = t.add(call("c2", SYSTEM, Message("user", (Text(f"<summary>{summary}</summary>"),))), reply("ok"))
    assert (added.record.edge, added.record.parent_call_id) == ("compacted_from", "c1")


def test_a_subagent_names_the_call_that_started_it():
    t = Trajectory("r1")
    t.add(call("c1", SYSTEM, USER, thread="main"), reply(asks(("a", "{}")), [1, 2], [3]))
    sub = (Message("system", (Text("you search"),)), Message("user", (Text("find it"),)))
    added = t.add(
        call("c2", *sub, kind="subagent", thread="s1", parent_thread="main", tools=()), reply("found", [7], [8])
    )
    assert (added.record.edge, added.record.parent_call_id) == ("spawned_by", "c1")
    more = t.add(
        call("c3", *sub, Message("assistant", (Text("found"),)), USER, kind="subagent", thread="s1", tools=()),
        reply("again", [7, 8, 9], [10]),
    )
    assert (more.record.edge, more.record.parent_call_id) == ("extends", "c2")
    assert {b.kind for b in t.branches} == {"agent", "subagent"}


@pytest.mark.parametrize("tokens", [True, False])
def test_a_parent_that_comes_late_adopts_its_child(tokens):
    t = Trajectory("r1")
    answer = asks(("a", "{}"))
    child = call("c2", SYSTEM, USER, answer, result("a"), inserted=((5, 6),))
    orphan = t.add(child, reply("done", *([[1, 2, 3, 4, 5, 6, 61], [7]] if tokens else ())))
    assert orphan.record.edge == "root"
    late = t.add(call("c1", SYSTEM, USER), reply(answer, *([[1, 2, 3], [4, 5]] if tokens else ())))
    assert t.record("c2").edge == "extends" and t.record("c2").parent_call_id == "c1"
    (branch,) = t.branches
    assert branch.call_ids == ("c1", "c2")
    if tokens:
        assert list(branch.ids) == [1, 2, 3, 4, 5, 6, 61, 7]
        assert branch.nodes[-2].inserted == ((0, 1),)
    latest = {node.id: node for added in (orphan, late) for node in added.nodes}
    again = Trajectory.restore("r1", [late.record, orphan.record], latest.values())
    assert again.nodes == t.nodes and again.branches == t.branches
    assert again.record("c2") == t.record("c2")
    more = call("c3", SYSTEM, USER, answer, result("a"), Message("assistant", (Text("done"),)), USER)
    for graph in (t, again):
        parent = graph.match(more).continues
        assert parent is not None and parent.call_id == "c2"


def test_unknown_ids_fork_no_proof_from_nothing():
    """A turn without ids in the middle: what follows is placed under the last proven turn, whole."""
    t = first_turn(asks(("a", "{}")))
    base = (SYSTEM, USER, asks(("a", "{}")), result("a"))
    t.add(call("c2", *base), reply(asks(("b", "{}"))))
    added = t.add(call("c3", *base, asks(("b", "{}")), result("b")), reply("x", [1, 2, 3, 4, 5, 6, 7, 8], [9]))
    assert added.record.parent_call_id == "c1"
    assert list(t.sequence("c3")) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert t.sequence("c2") is None
    proven, whole = t.branches
    assert (proven.call_ids, list(proven.ids), proven.trained) == (("c1", "c2"), [1, 2, 3, 4, 5], 2)
    assert "known for 3 of 5 messages" in proven.flaws[0]
    assert list(whole.mask) == [0, 0, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("logprobs", "word"),
    [
        ([-1.0], "1 logprobs for 2"),
        ([-1.0, float("nan")], "finite"),
        ([-1.0, -9999.0], "placeholder"),
        ([0.5, -1], "positive"),
    ],
)
def test_an_answer_with_bad_logprobs_never_trains(logprobs, word):
    t = Trajectory("r1")
    bad = Reply(
        message=Message("assistant"), prompt_ids=ids([1]), completion_ids=ids([2, 3]), logprobs=floats(logprobs)
    )
    added = t.add(call("c1", SYSTEM, USER), bad)
    assert not added.record.trainable and word in added.record.flaws[0]
    (branch,) = t.branches
    assert branch.trained == 0 and word in branch.flaws[0]


def test_versions_follow_the_spans_of_a_resumed_answer():
    t = first_turn("x", spans=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)), version_start=3, version_end=4)
    assert list(t.branches[0].versions) == [-1, -1, -1, 3, 4]
    t = first_turn("x", version_start=7, version_end=7)
    assert list(t.branches[0].versions) == [-1, -1, -1, 7, 7]


def test_bodies_of_a_growing_conversation_are_kept_as_differences():
    from rollyard.core.delta import Delta, apply

    t = Trajectory("r1")
    head = b'{"model":"m","messages":[' + b'{"role":"user","content":"' + b"x" * 20_000 + b'"}'
    bodies, kept = [], {}
    messages = [SYSTEM, USER]
    for turn in range(5):
        body = head + b',{"role":"tool","content":"y"}' * turn + b'],"tools":[' + b"z" * 3000 + b"]}"
        added = t.add(call(f"c{turn}", *messages, raw=body), reply(asks((f"t{turn}", "{}")), usage=Usage()))
        kept.update(added.blobs)
        bodies.append((added.record.raw_request, body))
        messages += [asks((f"t{turn}", "{}")), result(f"t{turn}")]

    def load(digest):
        blob = kept[digest]
        return apply(blob, load(blob.base)) if isinstance(blob, Delta) else blob

    assert all(load(digest) == body for digest, body in bodies)
    whole = [blob for digest, blob in kept.items() if not isinstance(blob, Delta) and len(digest) == 32]
    assert whole == [bodies[0][1]]
    assert sum(blob.size for blob in kept.values() if isinstance(blob, Delta)) < 1000


def test_packed_ids_are_not_shared_with_the_caller():
    prompt = array("i", [1, 2])
    t = Trajectory("r1")
    t.add(call("c1", SYSTEM, USER), Reply(message=Message("assistant"), prompt_ids=prompt, completion_ids=ids([3])))
    prompt.append(9)
    assert list(t.sequence("c1")) == [1, 2, 3]


def test_a_turn_of_an_agent_takes_little_memory_whatever_its_history():
    """A 50 kB request with 10k prompt ids adds what is new: the budget is 60 kB a turn."""
    import gc

    t = Trajectory("r1")
    messages = [Message("system", (Text("s" * 20_000),)), USER]
    prompt = list(range(8000))
    with trace_memory() as traced:
        for turn in range(20):
            raw = b'{"messages":["' + b"s" * (30_000 + 1000 * turn) + b'"],"tools":["' + b"t" * 9000 + b'"]}'
            answer = asks((f"t{turn}", '{"n": 1}'), text="a" * 200)
            echoed = tuple(Message(m.role, m.parts) for m in messages)
            t.add(call(f"c{turn}", *echoed, raw=raw), reply(answer, prompt, [1] * 64))
            messages += [answer, result(f"t{turn}", "o" * 800)]
            prompt = [*prompt, *[1] * 64, *[2] * 100]
        del echoed, raw, prompt, messages, answer
        gc.collect()
        held = traced()[0]
    assert held / 20 < 20_000


def _other(text):
    return Message("user", (Text(text),))


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        pytest.param(call("c3", _other("new")), reply("x", [9, 9], [8]), id="plain"),
        pytest.param(call("c3", _other("new"), raw=b"failed"), reply("x", [9, 9], [8]), id="failed before"),
        pytest.param(call("c3", _other("new")), reply("x", [1, 2, 3, 4, 5, 6], [8]), id="tokens of the first turn"),
        pytest.param(
            call("c3", _other("new"), asks(("z", "{}")), result("z")),
            reply("x", [9, 7, 6], [8]),
            id="before its parent",
        ),
        pytest.param(
            call("c3", _other("new")),
            reply("x", [9, 9], [8], break_reason="bridge_unproven"),
            id="the policy knows why",
        ),
        pytest.param(call("c3", _other("new"), tools=()), reply("x"), id="no tokens"),
        pytest.param(call("c3", _other("So: " + "so on, " * 40)), reply("x", [9, 9], [8]), id="quotes the answer"),
        pytest.param(call("c3", _other("new"), kind="subagent"), reply("x", [9, 9], [8]), id="subagent"),
    ],
)
def test_a_call_that_begins_anew_is_placed_as_if_it_had_not_been_matched_before(request_, answer):
    placed = []
    for matched in (False, True):
        t = first_turn(asks(("a", "{}"), text="so on, " * 40))
        t.add(call("c2", _other("lost"), raw=b"failed"), None, error="502")
        added = t.add(request_, answer, match=t.match(request_) if matched else None)
        t.add(call("c4", _other("new")), reply(asks(("z", "{}")), [9], [7]))  # the parent of one of them, late
        placed.append((added, t.records, t.nodes))
    assert placed[0] == placed[1]
