"""A history item is parsed once in a session; the call is the same with and without the memo."""

import json

import msgspec
import pytest

from rollyard.core.errors import GateError, TooLarge
from rollyard.core.message import Message, Text
from rollyard.wire import CODECS
from rollyard.wire.body import split_object
from rollyard.wire.codec import MAX_BODY, WireRequest
from rollyard.wire.history import CHAT_HISTORY, split_around

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
    assert len(memo) == 4 + 2 + 1  # and the last tools of each, and what a chat's next request may begin with


def test_only_what_follows_the_request_before_is_parsed():
    memo = {}
    decode("chat", body("chat", 5), memo)
    known = memo[b"chat history"]
    memo.clear()
    memo[b"chat history"] = known
    after = decode("chat", body("chat", 6), memo)
    assert after.messages == decode("chat", body("chat", 6)).messages
    parsed = [value for value in memo.values() if isinstance(value, Message)]
    assert parsed == list(after.messages[-2:])


def _spaced(turns):
    return json.dumps(json.loads(body("chat", turns)), indent=2).encode()


def _with(more, turns=2):
    """A request with more members at its end."""
    return body("chat", turns)[:-1] + b", " + more + b"}"


NEXT = {
    "the same again": body("chat", 2),
    "one turn more": body("chat", 3),
    "one turn less": body("chat", 1),
    "indented": _spaced(3),
    "a member behind it": _with(b'"temperature": 0.5', 3),
    "the history twice, the second counts": _with(b'"messages": [{"role": "user", "content": "other"}]'),
    "twice, in other letters": _with(b'"mess\\u0061ges": [{"role": "user", "content": "other"}]'),
    "twice, the second is longer": _with(
        b'"messages": ' + json.dumps(json.loads(body("chat", 4))["messages"]).encode()
    ),
    "twice, the second is no history": _with(b'"messages": "all of it"'),
    "an item that is none": body("chat", 2).replace(b'"r"}]', b'"r"}, 7]'),
    "cut off": body("chat", 3)[:-9],
    "no comma": body("chat", 2).replace(b'"r"}]', b'"r"} {"role": "user", "content": "x"}]'),
    "an unknown member": _with(b'"no_such_member": 1', 3),
    "more than one choice": _with(b'"n": 2', 3),
}
BEFORE = {
    "plain": body("chat", 2),
    "indented": _spaced(2),
    "the same list elsewhere first": b'{"metadata": {"messages": %b}, %b'
    % (json.dumps(json.loads(body("chat", 2))["messages"]).encode(), body("chat", 2)[1:]),
}


def outcome(data, memo=None):
    try:
        call = decode("chat", data, memo)
    except GateError as error:
        return type(error), str(error)
    if call.history is not None:
        around = split_around(data, "messages", call.history)
        if around is not None:
            assert _bytes({**around, "messages": data[slice(*call.history)]}) == _bytes(split_object(data))
    return call.messages, call.tools, call.sampling


def _bytes(members):
    return {name: bytes(value) for name, value in members.items()}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("following", NEXT)
def test_a_request_means_the_same_after_any_other(before, following):
    memo = {}
    outcome(BEFORE[before], memo)
    for data in (NEXT[following], BEFORE[before] + b" ", NEXT[following], body("chat", 4)):
        assert outcome(data, memo) == outcome(data)


@pytest.mark.parametrize("following", NEXT)
def test_a_request_means_the_same_once_all_but_its_history_is_known(following):
    memo = {}
    for turns in (1, 2):
        outcome(body("chat", turns), memo)
    assert memo[CHAT_HISTORY].rest is not None
    for data in (NEXT[following], body("chat", 3), NEXT[following], body("chat", 4)):
        assert outcome(data, memo) == outcome(data)


@pytest.mark.parametrize(
    "middle",
    [
        b'], "messages": [{"role": "user", "content": "other"}',
        b'], "temperature": 1, "metadata": [{"role": "user", "content": "x"}',
        b', {"role": "user", "content": "x"}], "messages": [',
        b", 7",
        b", ",
        b'{"role": "user", "content": "no comma"}',
        b', {"role": "user", "content": "unfinished',
        b"",
    ],
)
def test_what_ends_as_the_request_before_is_read_whole_where_more_than_messages_is_new(middle):
    memo = {}
    for turns in (1, 2, 3):
        outcome(body("chat", turns), memo)
    known = memo[CHAT_HISTORY]
    data = bytes(known.text) + middle + known.rest.text
    assert outcome(data, memo) == outcome(data)
    assert outcome(body("chat", 4), memo) == outcome(body("chat", 4))


def test_the_same_list_in_another_member_is_not_the_history():
    listed = json.dumps(json.loads(body("chat", 2))["messages"]).encode()
    head = b'{"model": "m", "metadata": {"messages": ' + listed
    memo = {}
    for tail in (b'}, "messages": ' + listed + b"}", b'}, "messages": [{"role": "user", "content": "only"}]}'):
        assert outcome(head + tail, memo) == outcome(head + tail)


def test_a_cache_mark_that_moves_does_not_change_a_digest():
    block = {"type": "text", "text": "x"}
    marked = {**block, "cache_control": {"type": "ephemeral"}}
    calls = [
        decode("messages", json.dumps({"messages": [{"role": "user", "content": content}]}).encode())
        for content in ("x", [block], [marked])
    ]
    assert len({call.messages[0].digest for call in calls}) == 1


def _around(messages, before=b'{"model": "m", ', after=b', "temperature": 0.5}'):
    return before + b'"messages": ' + json.dumps(messages).encode() + after


AROUND = {
    "plain": {},
    "indented": {"before": b'{\n  "model": "m",\n  ', "after": b' ,\n  "temperature": 0.5\n}'},
    "twice, the second counts": {"after": b', "messages": [{"role": "user", "content": "other"}]}'},
    "the same list elsewhere first": {"before": b'{"metadata": {"messages": []}, "model": "m", '},
}
HISTORIES = [
    [{"role": "user", "content": f"question {number}"}, {"role": "user", "content": "x" * 300 * number}]
    for number in range(3)
]
ODD_HISTORIES = [[], [7], [{"role": "nobody"}], [{"role": "user", "content": "a"}] * 3]


@pytest.mark.parametrize("around", AROUND)
def test_requests_with_nothing_in_common_but_their_surroundings_mean_what_they_say(around):
    memo = {}
    for history in (*HISTORIES, *ODD_HISTORIES, *HISTORIES):
        data = _around(history, **AROUND[around])
        assert outcome(data, memo) == outcome(data)


def test_surroundings_that_were_seen_twice_are_not_read_again():
    memo = {}
    for history in HISTORIES[:2]:
        decode("chat", _around(history), memo)
    known = memo[CHAT_HISTORY].rest.settings
    third = decode("chat", _around(HISTORIES[2]), memo)
    assert third.sampling is known.sampling and third.sampling.temperature == 0.5


def test_a_request_that_begins_otherwise_means_what_it_says():
    memo = {}
    for history in HISTORIES[:2]:
        outcome(_around(history, before=b'{"seed": 1, "model": "m", '), memo)
    assert memo[CHAT_HISTORY].rest is not None
    for seed in (2, 1):
        data = _around(HISTORIES[2], before=b'{"seed": %d, "model": "m", ' % seed)
        assert outcome(data, memo) == outcome(data)
        assert decode("chat", data, memo).sampling.seed == seed


def test_a_request_that_ends_within_its_history_is_none():
    """It ends in the very bytes that close the request before."""
    memo, item = {}, {"role": "user", "content": [{"type": "text", "text": "a"}]}
    for count in (1, 2):
        outcome(_around([item] * count, before=b"{", after=b"}"), memo)
    known = memo[CHAT_HISTORY]
    assert known.rest.text == b"]}" == bytes(known.text)[-2:]
    assert outcome(bytes(known.text), memo) == outcome(bytes(known.text))


def test_no_comma_may_follow_the_bracket_after_a_history_that_was_empty():
    memo = {}
    for _ in range(2):
        outcome(_around([]), memo)
    data = _around(HISTORIES[1]).replace(b"[{", b"[, {", 1)
    assert outcome(data, memo) == outcome(data)


def test_what_is_too_large_is_refused_however_much_of_it_is_known():
    memo = {}
    for history in HISTORIES[:2]:
        outcome(_around(history), memo)
    data = _around([{"role": "user", "content": "x" * MAX_BODY}])
    assert outcome(data, memo) == outcome(data)
    assert outcome(data)[0] is TooLarge


def test_surroundings_of_a_list_that_does_not_count_are_never_known():
    counts, other = HISTORIES[1], HISTORIES[2]
    after = b', "messages": ' + json.dumps(counts).encode() + b"}"
    memo = {}
    for history in (counts, counts, other):  # the first two look as if their first list was the one that counts
        data = _around(history, after=after)
        assert outcome(data, memo) == outcome(data)
        assert memo[CHAT_HISTORY].rest is None


@pytest.mark.parametrize("dialect", TOOLS)
def test_what_is_sent_upstream_is_the_same_with_and_without_a_memo(dialect):
    codec, read, sent = CODECS["chat"], {}, {}
    extra = {"return_token_ids": True}
    for turns in (0, 1, 2, 2, 5, 1):
        call = decode(dialect, body(dialect, turns), read)
        for changes in (
            {},
            {"temperature": 0.1},
            {"max_tokens": 7, "extra": {"top_a": 1}},
            {"extra": {"messages": []}},
        ):
            sampling = msgspec.structs.replace(call.sampling, **changes)
            plain = codec.encode_request(call, model="up", sampling=sampling, extra=extra)
            for _ in range(2):
                kept = codec.encode_request(call, model="up", sampling=sampling, extra=extra, memo=sent)
                assert json.loads(kept) == json.loads(plain)
        bare = msgspec.structs.replace(call, tools=())
        assert json.loads(
            codec.encode_request(bare, model="n", sampling=call.sampling, extra={}, memo=sent)
        ) == json.loads(codec.encode_request(bare, model="n", sampling=call.sampling, extra={}))
