"""A history item is parsed once in a session; the call is the same with and without the memo."""

import json

import pytest

from rollyard.core.message import Message, Text
from rollyard.wire import CODECS
from rollyard.wire.codec import WireRequest

TOOLS = {
    "chat": [{"type": "function", "function": {"name": "shell"}}],
    "messages": [{"name": "shell", "input_schema": {}}],
    "responses": [{"type": "function", "name": "shell"}],
    "gemini": [{"functionDeclarations": [{"name": "shell"}]}],
}


def body(dialect, turns):
    """A conversation of `turns` turns, each a call and its result."""
    ids = range(turns)
    if dialect == "chat":
        items = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        for i in ids:
            call = {"id": f"c{i}", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
            items += [
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{i}", "content": "r"},
            ]
        whole = {"messages": items}
    elif dialect == "messages":
        items = [{"role": "user", "content": "u"}]
        for i in ids:
            items.append(
                {"role": "assistant", "content": [{"type": "tool_use", "id": f"c{i}", "name": "shell", "input": {}}]}
            )
            result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": "r"}
            items.append({"role": "user", "content": [result, {"type": "text", "text": "note"}]})
        whole = {"system": "s", "messages": items}
    elif dialect == "responses":
        items = [{"role": "developer", "content": "s"}, {"role": "user", "content": "u"}]
        for i in ids:
            items.append({"type": "reasoning", "id": f"rs_{i}", "summary": [{"type": "summary_text", "text": "t"}]})
            items.append({"type": "function_call", "call_id": f"c{i}", "name": "shell", "arguments": "{}"})
            items.append({"type": "function_call_output", "call_id": f"c{i}", "output": "r"})
        whole = {"input": items}
    else:
        items = [{"role": "user", "parts": [{"text": "u"}]}]
        for i in ids:
            items.append({"role": "model", "parts": [{"functionCall": {"id": f"c{i}", "name": "shell", "args": {}}}]})
            response = {"id": f"c{i}", "name": "shell", "response": {"output": "r"}}
            items.append({"role": "user", "parts": [{"functionResponse": response}]})
        whole = {"systemInstruction": {"parts": [{"text": "s"}]}, "contents": items}
    return json.dumps({"model": "m", "tools": TOOLS[dialect], **whole}).encode()


def decode(dialect, data, memo=None):
    return CODECS[dialect].decode(WireRequest(call_id="c", rollout_id="r", body=data, headers={}, model="m"), memo)


@pytest.mark.parametrize("dialect", TOOLS)
def test_later_turns_hold_the_very_objects_of_earlier_ones(dialect):
    memo = {}
    before = decode(dialect, body(dialect, 5), memo)
    after = decode(dialect, body(dialect, 6), memo)
    shared = len(before.messages)
    assert [id(m) for m in after.messages[:shared]] == [id(m) for m in before.messages]
    assert after.tools is before.tools and after.tools_digest == before.tools_digest != b""
    assert after.messages == decode(dialect, body(dialect, 6)).messages


@pytest.mark.parametrize("dialect", TOOLS)
def test_what_a_turn_adds_to_the_memo_does_not_grow_with_the_turn(dialect):
    memo, sizes = {}, []
    for turns in range(8):
        decode(dialect, body(dialect, turns), memo)
        sizes.append(len(memo))
    grown = [after - before for before, after in zip(sizes, sizes[1:], strict=False)]
    assert len(set(grown)) == 1 and grown[0] <= 4


@pytest.mark.parametrize("dialect", TOOLS)
def test_an_item_that_changed_is_read_again(dialect):
    memo = {}
    before = decode(dialect, body(dialect, 2), memo)
    after = decode(dialect, body(dialect, 2).replace(b'"u"', b'"v"'), memo)
    assert after.messages[1] == Message("user", (Text("v"),)) != before.messages[1]
    assert after.messages[2:] == before.messages[2:]


def test_dialects_that_share_a_memo_do_not_read_each_others_items():
    memo = {}
    same = {"role": "user", "content": [{"type": "text", "text": "x", "thinking": "y"}]}
    data = json.dumps({"messages": [same], "tools": []}).encode()
    assert decode("chat", data, memo).messages == decode("messages", data, memo).messages
    assert len(memo) == 4


def test_a_cache_mark_that_moves_does_not_change_a_digest():
    block = {"type": "text", "text": "x"}
    marked = {**block, "cache_control": {"type": "ephemeral"}}
    calls = [
        decode("messages", json.dumps({"messages": [{"role": "user", "content": content}]}).encode())
        for content in ("x", [block], [marked])
    ]
    assert len({call.messages[0].digest for call in calls}) == 1
