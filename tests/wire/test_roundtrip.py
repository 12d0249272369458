"""What goes out in a dialect comes back as it was: requests, answers, and streams cut anywhere."""

import base64
import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollyard.core.call import Call, Reply, Sampling, Usage
from rollyard.core.message import Image, Message, Text, Thinking, ToolCall, ToolResult, ToolSpec, tools_digest
from rollyard.wire import CODECS
from rollyard.wire.codec import WireRequest

from .stream_reader import read_stream

DIALECTS = ["chat", "responses", "messages", "gemini"]
relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(names, json_values, max_size=3).map(lambda v: msgspec.json.encode(v).decode())
base64s = st.binary(min_size=3, max_size=9).map(lambda b: base64.b64encode(b).decode())
images = st.builds(lambda d: Image("image/png", d), base64s)


def thinking(dialect):
    if dialect == "chat":
        return st.builds(Thinking, words)
    return st.builds(Thinking, words, base64s)


TOOLS = (
    ToolSpec("shell", "runs", '{"type":"object","properties":{"c":{"type":"string"}}}'),
    ToolSpec("read", "", '{"type":"object"}'),
)
NAMESPACED = (*TOOLS, ToolSpec("magic", "", '{"type":"object"}', namespace="mcp__t"))
CUSTOM = ToolSpec("patch", "", kind="custom", raw='{"type":"custom","name":"patch","description":""}')


@st.composite
def tool_calls(draw, dialect, number):
    calls = []
    for index in range(draw(st.integers(0, 3))):
        call_id = f"call_{number}_{index}"
        if dialect == "responses" and draw(st.booleans()):
            calls.append(draw(st.sampled_from(["magic", "patch"])))
            if calls[-1] == "magic":
                calls[-1] = ToolCall(call_id, "magic", draw(arguments), "mcp__t")
            else:
                text = msgspec.json.encode({"input": draw(words)}).decode()
                calls[-1] = ToolCall(call_id, "patch", text)
        else:
            signature = draw(st.none() | base64s) if dialect == "gemini" else None
            name = draw(st.sampled_from(["shell", "read"]))
            calls.append(ToolCall(call_id, name, draw(arguments), None, signature))
    return calls


@st.composite
def assistants(draw, dialect, number):
    thoughts = draw(st.lists(thinking(dialect), max_size=1))
    texts = draw(st.lists(st.builds(Text, words), max_size=1 if dialect in ("gemini", "chat") else 2))
    calls = draw(tool_calls(dialect, number))
    parts = (*thoughts, *texts, *calls) or (Text("."),)
    return Message("assistant", tuple(parts))


@st.composite
def results(draw, dialect, call):
    parts = [Text(draw(words))] if draw(st.booleans()) else []
    if dialect != "chat":
        parts += draw(st.lists(images, max_size=1))
    is_error = dialect in ("messages", "gemini") and bool(parts) and isinstance(parts[0], Text) and draw(st.booleans())
    name = call.name if dialect == "gemini" else None
    return Message("tool", (ToolResult(call.id, tuple(parts), is_error, name),))


@st.composite
def histories(draw, dialect):
    messages = []
    if draw(st.booleans()):
        messages.append(Message("system", tuple(Text(t) for t in draw(st.lists(words, min_size=1, max_size=2)))))
    for number in range(draw(st.integers(1, 3))):
        parts = draw(st.lists(st.builds(Text, words) | images, min_size=1, max_size=3))
        messages.append(Message("user", tuple(parts)))
        answer = draw(assistants(dialect, number))
        messages.append(answer)
        for call in answer.tool_calls:
            messages.append(draw(results(dialect, call)))
    return tuple(messages)


floats = st.floats(0, 2, allow_nan=False)


@st.composite
def samplings(draw, dialect):
    fields = {
        "temperature": draw(st.none() | floats),
        "top_p": draw(st.none() | floats),
        "max_tokens": draw(st.integers(1, 99999)),
        "tool_choice": draw(
            st.sampled_from([None, "auto", "none", "required", '{"type":"function","function":{"name":"read"}}'])
        ),
        "response_format": draw(
            st.sampled_from([None, '{"type":"json_schema","json_schema":{"name":"answer","schema":{"type":"object"}}}'])
        ),
        "reasoning": draw(st.sampled_from([None, '{"effort":"high"}'])),
    }
    if dialect != "gemini":
        fields["parallel_tool_calls"] = draw(st.none() | st.booleans())
    if dialect == "messages" and fields["parallel_tool_calls"] is not None and fields["tool_choice"] is None:
        fields["tool_choice"] = "auto"
    if dialect in ("chat", "messages", "gemini"):
        fields["stop"] = tuple(draw(st.lists(words, max_size=2)))
        fields["top_k"] = draw(st.none() | st.integers(1, 99))
    if dialect in ("chat", "gemini"):
        fields["seed"] = draw(st.none() | st.integers(0, 9))
        fields["presence_penalty"] = draw(st.none() | floats)
        fields["logprobs"] = draw(st.none() | st.booleans())
        fields["top_logprobs"] = draw(st.none() | st.integers(0, 9))
    return Sampling(**fields)


@st.composite
def calls(draw, dialect):
    tools = (*NAMESPACED, CUSTOM) if dialect == "responses" else TOOLS
    return Call(
        id="call_1",
        rollout_id="rol_1",
        dialect=dialect,
        model="m",
        messages=draw(histories(dialect)),
        tools=tools,
        tools_digest=tools_digest(tools),
        sampling=draw(samplings(dialect)),
    )


usages = st.builds(
    Usage,
    prompt_tokens=st.integers(20, 99),
    completion_tokens=st.integers(20, 99),
    cached_tokens=st.integers(0, 20),
    reasoning_tokens=st.integers(0, 20),
)


@st.composite
def replies(draw, dialect):
    message = draw(assistants(dialect, 7))
    finish = "tool_calls" if message.tool_calls else draw(st.sampled_from(["stop", "length"]))
    if not message.tool_calls and message.text and draw(st.booleans()):
        finish = "refusal"
    return Reply(message=message, finish=finish, usage=draw(usages))


def asked(dialect, **fields):
    tools = (*NAMESPACED, CUSTOM)
    return Call(id="call_1", rollout_id="rol_1", dialect=dialect, model="m", messages=(), tools=tools, **fields)


def seen(reply):
    return reply.message, reply.finish, reply.usage


def request(body, **fields):
    return WireRequest(call_id="call_1", rollout_id="rol_1", body=body, headers={}, model="m", **fields)


@pytest.mark.parametrize("dialect", DIALECTS)
@relaxed
@given(data=st.data())
def test_a_request_decodes_to_the_call_it_was_made_from(dialect, data):
    call = data.draw(calls(dialect))
    codec = CODECS[dialect]
    body = codec.encode_request(call, model="m", sampling=call.sampling, extra={})
    again = codec.decode(request(body))
    assert again.messages == call.messages
    assert again.tools == call.tools
    assert again.tools_digest == call.tools_digest
    assert again.sampling == call.sampling


UNREAD = {"chat": "metadata", "messages": "metadata", "responses": "metadata", "gemini": "labels"}  # passed on unread


@pytest.mark.parametrize("dialect", DIALECTS)
@relaxed
@given(data=st.data())
def test_a_request_of_its_own_dialect_is_patched_and_keeps_every_byte_of_its_history(dialect, data):
    call = data.draw(calls(dialect))
    codec = CODECS[dialect]
    first = codec.encode_request(call, model="m", sampling=call.sampling, extra={UNREAD[dialect]: [1, 2]})
    received = codec.decode(request(first))
    wanted = msgspec.structs.replace(received.sampling, temperature=0.25, max_tokens=7)
    patched = codec.encode_request(received, model="other", sampling=wanted, extra={"asked": None})
    again = codec.decode(request(patched))
    assert again.messages == call.messages and again.tools == call.tools
    assert again.sampling == wanted
    member = {"chat": "messages", "messages": "messages", "responses": "input", "gemini": "contents"}[dialect]
    before, after = (msgspec.json.decode(b, type=dict[str, msgspec.Raw]) for b in (first, patched))
    assert bytes(before[member]) == bytes(after[member])
    assert bytes(after[UNREAD[dialect]]) == b"[1,2]" and bytes(after["asked"]) == b"null"
    if dialect != "gemini":
        assert json.loads(patched)["model"] == "other"


@pytest.mark.parametrize("dialect", DIALECTS)
@relaxed
@given(data=st.data())
def test_any_dialect_reaches_any_upstream(dialect, data):
    """The words, calls and results of a conversation survive the way through another dialect."""
    call = data.draw(calls(dialect))
    for other in DIALECTS:
        body = CODECS[other].encode_request(call, model="m", sampling=call.sampling, extra={})
        again = CODECS[other].decode(request(body))
        if dialect != "responses" or other == "responses":
            assert [t.name for t in again.tools] == [t.name for t in call.tools]
        said = [(m.role, m.text) for m in call.messages if m.text and m.role != "tool"]
        assert [(m.role, m.text) for m in again.messages if m.text and m.role != "tool"] == said
        sent = [
            (r.call_id, "".join(p.text for p in r.parts if isinstance(p, Text)))
            for m in call.messages
            for r in m.tool_results
        ]
        got = [
            (r.call_id, "".join(p.text for p in r.parts if isinstance(p, Text)))
            for m in again.messages
            for r in m.tool_results
        ]
        assert got == sent
        wanted = [(c.id, json.loads(c.arguments)) for m in call.messages for c in m.tool_calls]
        assert [(c.id, json.loads(c.arguments)) for m in again.messages for c in m.tool_calls] == wanted


@pytest.mark.parametrize("dialect", DIALECTS)
@relaxed
@given(data=st.data())
def test_an_answer_reads_back_as_the_reply(dialect, data):
    reply = data.draw(replies(dialect))
    codec, call = CODECS[dialect], asked(dialect)
    assert seen(codec.decode_reply(codec.encode(call, reply), call)) == seen(reply)


@pytest.mark.parametrize("dialect", DIALECTS)
@relaxed
@given(data=st.data())
def test_a_stream_reads_back_as_the_reply(dialect, data):
    reply = data.draw(replies(dialect))
    codec, call = CODECS[dialect], asked(dialect, stream=True, include_usage=True)
    body = codec.keepalive(call) + b"".join(codec.stream(call, reply))
    assert seen(codec.decode_reply(read_stream(dialect, body), call)) == seen(reply)


def echoed(dialect, body):
    """The next request of an agent that re-serialises what it was told and drops the thinking."""
    answer = json.loads(body)
    if dialect == "chat":
        message = answer["choices"][0]["message"]
        message.pop("reasoning_content", None)
        for call in message.get("tool_calls") or ():
            if "function" in call:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        return {"messages": [message]}
    if dialect == "messages":
        return {
            "messages": [{"role": "assistant", "content": [b for b in answer["content"] if b["type"] != "thinking"]}]
        }
    if dialect == "responses":
        return {"input": [item for item in answer["output"] if item["type"] != "reasoning"]}
    parts = [part for part in answer["candidates"][0]["content"]["parts"] if not part.get("thought")]
    return {"contents": [{"role": "model", "parts": parts}]}


@pytest.mark.parametrize("dialect", DIALECTS)
@relaxed
@given(data=st.data())
def test_an_echo_has_the_digest_of_what_was_sent(dialect, data):
    reply = data.draw(replies(dialect))
    codec, call = CODECS[dialect], asked(dialect)
    again = echoed(dialect, codec.encode(call, reply))
    again = codec.decode(request(json.dumps(again).encode()))
    if any(not isinstance(part, Thinking) for part in reply.message.parts):
        assert [message.digest for message in again.messages] == [reply.message.digest]


@relaxed
@given(reply=replies("gemini"))
def test_a_gemini_array_is_one_json_document(reply):
    codec, call = CODECS["gemini"], asked("gemini", stream=True, framing="array")
    body = codec.opening(call) + codec.keepalive(call) + b"".join(codec.stream(call, reply, opened=True))
    framed = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in json.loads(body))
    assert seen(codec.decode_reply(read_stream("gemini", framed), call)) == seen(reply)


@relaxed
@given(prompt=words, sampling=samplings("chat"), text=words, usage=usages)
def test_a_bare_prompt_and_its_continuation_come_back(prompt, sampling, text, usage):
    codec = CODECS["completions"]
    plain = msgspec.structs.replace(
        sampling, tool_choice=None, parallel_tool_calls=None, reasoning=None, response_format=None, logprobs=None
    )
    plain = msgspec.structs.replace(plain, top_logprobs=None)
    message = Message("user", (Text(prompt),))
    call = Call(id="c", rollout_id="r", dialect="completions", model="m", messages=(message,), sampling=plain)
    again = codec.decode(request(codec.encode_request(call, model="m", sampling=plain, extra={})))
    assert (again.messages, again.sampling) == (call.messages, plain)
    reply = Reply(message=Message("assistant", (Text(text),)), usage=usage)
    assert seen(codec.decode_reply(codec.encode(call, reply))) == seen(reply)
    whole = b"".join(codec.stream(msgspec.structs.replace(call, include_usage=True), reply))
    assert seen(codec.decode_reply(read_stream("completions", whole))) == seen(reply)
