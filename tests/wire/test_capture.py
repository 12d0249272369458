"""What model servers say of their tokens is found wherever they say it, and believed only when it fits."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.core.call import VersionSpan
from rollyard.core.errors import UpstreamError
from rollyard.core.experts import RoutedExperts
from rollyard.wire import CODECS

decode = CODECS["chat"].decode_reply


def answer(choice=None, **top):
    message = {"role": "assistant", "content": "hello"}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop", **(choice or {})}], **top}
    return json.dumps(body).encode()


def content(*values, **fields):
    return {"content": [{"token": f"t{i}", "logprob": v, **fields} for i, v in enumerate(values)]}


def test_vllm_ids_at_the_top_and_in_the_choice():
    reply = decode(
        answer(
            {"token_ids": [7, 8], "logprobs": content(-0.5, -1.0)},
            prompt_token_ids=[1, 2, 3],
            usage={"completion_tokens": 2},
        )
    )
    assert reply.prompt_ids.tolist() == [1, 2, 3] and reply.completion_ids.tolist() == [7, 8]
    assert reply.logprobs.tolist() == [-0.5, -1.0] and [t.text for t in reply.tokens] == ["t0", "t1"]
    assert (reply.capture, reply.trainable, reply.flaws, reply.prompt_source) == ("tokens", True, (), "engine")


def test_vllm_routed_experts_in_the_choice():
    experts = RoutedExperts(1, 2, 1, bytes(8))
    choice = {"token_ids": [7, 8], "logprobs": content(-0.5, -1.0), "routed_experts": experts.to_base64()}
    assert decode(answer(choice, prompt_token_ids=[1, 2, 3])).experts == experts
    broken = decode(answer(choice | {"routed_experts": "?"}, prompt_token_ids=[1, 2, 3]))
    assert broken.experts is None and "no base64" in broken.flaws[0] and not broken.trainable


def test_sglang_ids_in_the_choice_and_versions_in_meta_info():
    meta = {"weight_version": "4", "weight_versions": [["3", 0, 1], ["4", 1, 2]]}
    reply = decode(
        answer({"token_ids": [7, 8], "prompt_token_ids": [1], "logprobs": content(-0.5, -1.0), "meta_info": meta})
    )
    assert reply.prompt_ids.tolist() == [1]
    assert (reply.version_start, reply.version_end) == (3, 4)
    assert reply.spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))


def test_sglang_ids_and_logprobs_only_in_meta_info():
    meta = {"output_token_logprobs": [[-0.5, 7, "a"], [-1.5, 8, "b"]], "weight_version": "default"}
    reply = decode(answer({"meta_info": meta}))
    assert reply.completion_ids.tolist() == [7, 8] and reply.logprobs.tolist() == [-0.5, -1.5]
    assert [t.text for t in reply.tokens] == ["a", "b"] and reply.version_start is None


def test_llama_cpp_ids_inside_logprobs():
    entries = {"content": [{"token": "a", "id": 7, "logprob": -0.5}, {"token": "b", "id": 8, "logprob": -1.0}]}
    reply = decode(answer({"logprobs": entries}, usage={"completion_tokens": 2}))
    assert reply.completion_ids.tolist() == [7, 8] and reply.capture == "tokens" and reply.prompt_ids is None


def test_llama_cpp_tokens_merged_into_fewer_entries_are_not_taken_for_the_sampled_ones():
    entries = {"content": [{"token": "a", "id": 7, "logprob": -0.5}]}
    reply = decode(answer({"logprobs": entries}, usage={"completion_tokens": 3}))
    assert reply.completion_ids is None and reply.logprobs is None
    assert (reply.capture, reply.trainable) == ("text", False)
    assert reply.flaws[0].startswith("token_count")


def test_ids_in_place_of_token_texts():
    entries = {"content": [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -1.0}]}
    assert decode(answer({"logprobs": entries})).completion_ids.tolist() == [7, 8]


def test_logprobs_without_ids_are_their_own_level():
    reply = decode(answer({"logprobs": content(-0.5)}))
    assert (reply.capture, reply.completion_ids, reply.trainable) == ("logprobs", None, True)


def test_text_alone_is_text():
    reply = decode(answer())
    assert (reply.capture, reply.logprobs, reply.completion_ids, reply.prompt_ids) == ("text", None, None, None)


@pytest.mark.parametrize(
    ("choice", "usage", "flaw"),
    [
        ({"token_ids": [7, 8], "logprobs": content(-0.5)}, None, "length_mismatch"),
        ({"token_ids": [7, 8], "logprobs": content(-0.5, None)}, None, "non_finite"),
        ({"token_ids": [7, 8], "logprobs": content(-0.5, 0.7)}, None, "positive"),
        ({"token_ids": [7, 8], "logprobs": content(-0.5, -9999.0)}, None, "sentinel"),
        ({"token_ids": [7, 8], "logprobs": content(-0.5, -1.0)}, {"completion_tokens": 3}, "token_count"),
        ({"token_ids": [7, 2**40], "logprobs": content(-0.5, -1.0)}, None, "ids_out_of_range"),
    ],
)
def test_what_does_not_fit_makes_the_turn_untrainable(choice, usage, flaw):
    reply = decode(answer(choice, usage=usage))
    assert not reply.trainable
    assert any(found.startswith(flaw) for found in reply.flaws), reply.flaws
    if reply.logprobs is not None and reply.completion_ids is not None:
        assert len(reply.logprobs) == len(reply.completion_ids)


def test_rounding_just_above_zero_is_no_flaw():
    assert decode(answer({"token_ids": [7], "logprobs": content(1e-7)})).trainable


def test_vllm_text_completions():
    choice = {
        "text": "ab",
        "finish_reason": "length",
        "token_ids": [7, 8],
        "prompt_token_ids": [1],
        "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.0], "top_logprobs": [{"a": -0.5}, None]},
    }
    reply = CODECS["completions"].decode_reply(json.dumps({"choices": [choice]}).encode())
    assert reply.completion_ids.tolist() == [7, 8] and reply.prompt_ids.tolist() == [1]
    assert (reply.capture, reply.finish, reply.tokens[0].top) == ("tokens", "length", (("a", -0.5),))


def test_gemini_token_ids():
    chosen = [{"token": "a", "tokenId": 7, "logProbability": -0.5}]
    candidate = {
        "content": {"parts": [{"text": "a"}]},
        "finishReason": "STOP",
        "logprobsResult": {"chosenCandidates": chosen},
    }
    usage = {"candidatesTokenCount": 1, "promptTokenCount": 4}
    reply = CODECS["gemini"].decode_reply(json.dumps({"candidates": [candidate], "usageMetadata": usage}).encode())
    assert reply.completion_ids.tolist() == [7] and reply.capture == "tokens"


def test_logprobs_of_a_part_of_a_responses_turn_are_not_those_of_the_turn():
    text = {"type": "output_text", "text": "a", "logprobs": [{"token": "a", "logprob": -0.5, "top_logprobs": []}]}
    output = [
        {"type": "message", "role": "assistant", "content": [text]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    body = {"status": "completed", "output": output, "usage": {"input_tokens": 1, "output_tokens": 9}}
    reply = CODECS["responses"].decode_reply(json.dumps(body).encode())
    assert (reply.capture, reply.logprobs, reply.trainable) == ("text", None, False)


@pytest.mark.parametrize("body", [b'{"choices": []}', b"{}", b'{"error": {"message": "no"}}'])
def test_an_answer_without_a_choice_is_an_error(body):
    for dialect in ("chat", "completions", "messages", "responses", "gemini"):
        with pytest.raises(UpstreamError):
            CODECS[dialect].decode_reply(body)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 60), st.sampled_from([",", ", "]))
@settings(deadline=None)
def test_prompt_ids_read_with_a_memo_are_those_read_without(values, cut, comma):
    """Also when a later prompt does not begin with the earlier one, or cuts a number short."""
    memo = {}
    values = [*range(1000, 1100), *values]  # a system prompt that all of them begin with
    for prompt in (
        values[:100],
        values[: 100 + cut],
        values,
        values[: cut // 2],
        [*values, 1, 12],
        [*values, 1, 123, 4],
        values,
    ):
        text = comma.join(map(str, prompt))
        body = b'{"choices": [{"message": {"content": "x"}}], "prompt_token_ids": [%b]}' % text.encode()
        assert decode(body, None, memo).prompt_ids.tolist() == prompt
