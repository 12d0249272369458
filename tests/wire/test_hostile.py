"""Hostile bytes end in a typed error or a value, on the agent's side and on the model server's; never in another exception."""

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollyard.core.call import Call, Reply, Sampling
from rollyard.core.errors import BadRequest, TooLarge, UpstreamError
from rollyard.policy.token_servers import spans_of
from rollyard.wire import CODECS
from rollyard.wire.codec import MAX_BODY, WireRequest

pytestmark = pytest.mark.adversarial
DIALECTS = list(CODECS)
HISTORY = {
    "chat": "messages",
    "messages": "messages",
    "responses": "input",
    "gemini": "contents",
    "completions": "prompt",
}
relaxed = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])


def decode(dialect, body, memo=None):
    return CODECS[dialect].decode(
        WireRequest(call_id="c", rollout_id="r", body=body, headers={}, model="m", stream=True), memo
    )


DEEP = b"[" * 100_000 + b"]" * 100_000
BODIES = {
    "empty": b"",
    "space": b"  \n",
    "not JSON": b"GET / HTTP/1.1",
    "half": b'{"model": "m", "HISTORY": [',
    "a list": b"[1, 2]",
    "a number": b"3",
    "null": b"null",
    "byte order mark": b"\xef\xbb\xbf{}",
    "latin-1": b'{"HISTORY": "\xff\xfe"}',
    "UTF-16": '{"HISTORY": "x"}'.encode("utf-16"),
    "NaN": b'{"HISTORY": [NaN]}',
    "NaN as option": b'{"HISTORY": [], "temperature": NaN, "generationConfig": {"temperature": NaN}}',
    "infinity": b'{"HISTORY": [{"role": "user", "content": Infinity}], "temperature": Infinity}',
    "deep history": b'{"HISTORY": %b}' % DEEP,
    "deep item": b'{"HISTORY": [{"role": "user", "content": %b, "parts": %b}]}' % (DEEP, DEEP),
    "deep tools": b'{"HISTORY": [], "tools": %b}' % DEEP,
    "deep unknown field": b'{"HISTORY": [], "x": %b}' % DEEP,
    "huge integer as text": b'{"HISTORY": %b}' % (b"9" * 5000),
    "lone surrogate": b'{"HISTORY": [{"role": "user", "content": "\\ud800", "parts": [{"text": "\\ud800"}]}, "\\ud800"]}',
    "wrong history": b'{"HISTORY": {"a": 1}}',
    "wrong item": b'{"HISTORY": [1, null, "x", [[]]]}',
    "wrong role": b'{"HISTORY": [{"role": 3}]}',
    "unknown role": b'{"HISTORY": [{"role": "wizard", "content": "x"}]}',
    "trailing text": b'{"HISTORY": "x"} {"HISTORY": "y"}',
}


@pytest.mark.parametrize("what", BODIES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_body_that_cannot_be_read_is_a_bad_request(dialect, what):
    body = BODIES[what].replace(b"HISTORY", HISTORY[dialect].encode())
    with pytest.raises(BadRequest):
        decode(dialect, body)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_numbers_out_of_range_are_a_bad_request(dialect):
    options = b'"temperature": 1e999, "max_tokens": 1e400, "max_output_tokens": 1e400'
    config = b'"generationConfig": {"temperature": 1e999}'
    with pytest.raises(BadRequest):
        decode(dialect, b'{"%b": [], %b, %b}' % (HISTORY[dialect].encode(), options, config))


WHOLE = {
    "chat": ("max_tokens", "seed", "top_k", "top_logprobs", "max_completion_tokens"),
    "completions": ("max_tokens", "seed", "top_k"),
    "messages": ("max_tokens", "top_k"),
    "responses": ("max_output_tokens", "top_logprobs"),
    "gemini": ("maxOutputTokens", "seed"),
}


@pytest.mark.parametrize(("dialect", "name"), [(dialect, name) for dialect in WHOLE for name in WHOLE[dialect]])
@pytest.mark.parametrize("number", [2**63, 2**64, -(10**30)])
def test_a_whole_number_that_could_not_be_stored_is_a_bad_request(dialect, name, number):
    """It would be found out when the call is committed: no call of the rollout could be kept after it."""
    body = '{"%s": "x", "max_tokens": 1, %s}' if dialect == "completions" else '{"%s": [], %s}'
    option = f'"{name}": {number}'
    option = f'"generationConfig": {{{option}}}' if dialect == "gemini" else option
    with pytest.raises(BadRequest, match="Expected `int`"):
        decode(dialect, (body % (HISTORY[dialect], option)).encode())


def _answer(**fields):
    choice = {"message": {"role": "assistant", "content": "x"}, "meta_info": fields.pop("meta_info", {})}
    return CODECS["chat"].decode_reply(json.dumps({"choices": [choice], **fields}).encode())


@pytest.mark.parametrize(
    "version", [pytest.param("9" * 25, id="25 digits"), pytest.param("9" * 5000, id="5000 digits"), 2**63, -1, True]
)
def test_a_version_that_could_not_be_stored_is_not_known(version):
    """A commit that it is in would fail, and no call of the rollout could be kept after it."""
    largest = 2**63 - 1
    for known, said in ((None, version), (largest, largest), (largest, f"{largest}")):
        plain, spans = (
            _answer(meta_info=meta) for meta in ({"weight_version": said}, {"weight_versions": [[said, 0, 1]]})
        )
        assert plain.message.text == spans.message.text == "x"
        assert plain.version_start == spans.version_start == known
        assert [span.version for span in spans_of([[said, 0, 1]])] == ([] if known is None else [known])


def test_a_count_of_tokens_that_could_not_be_stored_is_the_servers_failure():
    """Prompts of Messages have three parts, and PostgreSQL's columns hold 31 bits."""
    assert 3 * _answer(usage={"prompt_tokens": 2**29}).usage.prompt_tokens < 2**31
    with pytest.raises(UpstreamError, match="prompt_tokens"):
        _answer(usage={"prompt_tokens": 2**29 + 1})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_body_of_64_megabytes_is_too_large(dialect):
    body = b'{"%b": "%b"}' % (HISTORY[dialect].encode(), b"x" * 64_000_000)
    assert len(body) > MAX_BODY
    with pytest.raises(TooLarge):
        decode(dialect, body)


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses", "gemini"])
def test_millions_of_tiny_items_are_refused_before_they_are_objects(dialect):
    body = b'{"%b": [%b1]}' % (HISTORY[dialect].encode(), b"1," * 8_000_000)
    with pytest.raises(TooLarge):
        decode(dialect, body)


def test_the_last_of_duplicate_keys_counts_and_the_body_is_kept():
    body = b'{"model": "a", "model": "b", "messages": [{"role": "user", "role": "system", "content": "x"}]}'
    call = decode("chat", body)
    assert (call.model, call.messages[0].role, call.raw) == ("b", "system", body)


def test_arguments_deeper_than_the_stack_are_carried_as_text():
    deep = '{"a":' * 50_000 + "1" + "}" * 50_000
    item = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": deep}}]}
    call = decode("chat", json.dumps({"messages": [item]}).encode())
    assert call.messages[0].tool_calls[0].arguments == deep
    for dialect in ("chat", "responses", "messages", "gemini"):
        reply = Reply(message=call.messages[0], finish="tool_calls")
        body = CODECS[dialect].encode(call, reply)
        assert CODECS[dialect].decode_reply(body).message.tool_calls[0].arguments == deep


def test_an_unreadable_item_is_not_remembered():
    memo = {}
    for _ in range(2):
        with pytest.raises(BadRequest):
            decode("chat", b'{"messages": [{"role": "user", "content": 3}]}', memo)
    assert memo == {}


WORDS = [
    *("messages", "input", "contents", "prompt", "model", "system", "tools", "stream", "role", "content", "parts"),
    *("type", "text", "tool_calls", "function", "name", "arguments", "id", "tool_call_id", "tool_use", "tool_result"),
    *("tool_use_id", "input_text", "output_text", "reasoning", "summary", "thinking", "signature", "call_id", "output"),
    *("functionCall", "functionResponse", "response", "args", "thought", "inlineData", "mimeType", "data", "source"),
    *("image", "image_url", "url", "base64", "media_type", "system_instruction", "systemInstruction", "namespace"),
    *("parameters", "functionDeclarations", "generationConfig", "toolConfig", "thinkingConfig", "tool_choice", "stop"),
    *("choices", "message", "delta", "finish_reason", "logprobs", "token_ids", "prompt_token_ids", "meta_info"),
    *("output_token_logprobs", "weight_versions", "usage", "candidates", "finishReason", "usageMetadata", "index"),
    *("logprobsResult", "chosenCandidates", "tokenId", "logProbability", "status", "incomplete_details", "reason"),
    *("stop_reason", "input_tokens", "output_tokens", "prompt_tokens", "completion_tokens", "custom", "refusal"),
    *("user", "assistant", "model", "tool", "developer", "message", "function_call", "function_call_output", "text"),
    *(
        "custom_tool_call",
        "redacted_thinking",
        "document",
        "web_search_call",
        "namespace",
        "error",
        "token",
        "top_logprobs",
    ),
]
leaves = (
    st.sampled_from(WORDS)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=30,
)
roots = st.dictionaries(st.sampled_from(WORDS), trees, max_size=6)


@st.composite
def bodies(draw, dialect):
    """Anything, but with a history of objects, so that it gets past the first look."""
    root = draw(roots)
    items = st.dictionaries(st.sampled_from(WORDS), trees, max_size=5)
    root[HISTORY[dialect]] = draw(st.lists(items, max_size=3))
    for item in root[HISTORY[dialect]]:
        item["role"] = draw(st.sampled_from(["user", "assistant", "model", "system", "tool"]))
    return root


@pytest.mark.parametrize("dialect", DIALECTS)
@relaxed
@given(data=st.data())
def test_any_json_is_a_call_or_a_bad_request_and_a_call_can_be_sent_anywhere(dialect, data):
    body = msgspec.json.encode(data.draw(bodies(dialect)))
    try:
        call = decode(dialect, body)
    except BadRequest:
        return
    for other in ("chat", "responses", "messages", "gemini"):
        for sampling in (call.sampling, Sampling(temperature=0.5, max_tokens=3)):
            json.loads(CODECS[other].encode_request(call, model="m", sampling=sampling, extra={}))


@pytest.mark.parametrize("dialect", DIALECTS)
@relaxed
@given(data=st.data())
def test_any_answer_is_a_reply_or_an_upstream_error_and_a_reply_can_be_told_to_anyone(dialect, data):
    root = data.draw(roots)
    seed = {
        "chat": "choices",
        "completions": "choices",
        "messages": "content",
        "responses": "output",
        "gemini": "candidates",
    }
    objects = st.lists(st.dictionaries(st.sampled_from(WORDS), trees, max_size=5), max_size=3)
    root[seed[dialect]] = data.draw(objects)
    try:
        reply = CODECS[dialect].decode_reply(msgspec.json.encode(root))
    except UpstreamError:
        return
    call = Call(id="c", rollout_id="r", dialect="chat", model="m", messages=())
    for codec in CODECS.values():
        json.loads(codec.encode(call, reply))
        assert b"".join(codec.stream(call, reply))


@pytest.mark.parametrize("dialect", DIALECTS)
@given(junk=st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_any_bytes_are_refused_on_both_sides(dialect, junk):
    with pytest.raises(BadRequest):
        decode(dialect, b"\x00" + junk)
    with pytest.raises(UpstreamError):
        CODECS[dialect].decode_reply(b"\x00" + junk)


@pytest.mark.parametrize("number", [-1, 2**63, 2**64])
@pytest.mark.parametrize(
    ("dialect", "answer"),
    [
        ("chat", {"choices": [{"message": {"role": "assistant", "content": "x"}}], "usage": {"prompt_tokens": 0}}),
        ("responses", {"output": [], "usage": {"output_tokens_details": {"reasoning_tokens": 0}}}),
        ("messages", {"content": [{"type": "text", "text": "x"}], "usage": {"cache_read_input_tokens": 0}}),
        ("gemini", {"candidates": [{"content": {"parts": [{"text": "x"}]}}], "usageMetadata": {"promptTokenCount": 0}}),
    ],
)
def test_a_number_of_tokens_that_cannot_be_is_no_answer(dialect, answer, number):
    """It would lower a budget, or could not be stored and end the rollout."""
    body = json.dumps(answer)
    assert CODECS[dialect].decode_reply(body.encode()) is not None
    with pytest.raises(UpstreamError):
        CODECS[dialect].decode_reply(body.replace(": 0}", f": {number}}}").encode())
