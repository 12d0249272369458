"""Prompt ids that the turn before had are not parsed again, and a reply means the same with them and without."""

import json

import pytest

from rollyard.core.errors import UpstreamError
from rollyard.wire import CODECS
from rollyard.wire.tokens import cut_prompt

CHAT = CODECS["chat"]
FIRST = list(range(1000, 1400))


def answer(ids, *, text="hello", separators=(",", ":"), **more):
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "token_ids": [1, 2],
    }
    body = {"id": "c", "prompt_token_ids": ids, "choices": [choice], **more}
    return json.dumps(body, separators=separators).encode()


def outcome(body, memo=None):
    try:
        reply = CHAT.decode_reply(body, None, memo)
    except UpstreamError as error:
        return type(error)
    return reply.message, reply.prompt_ids, reply.completion_ids, reply.flaws, reply.usage


PLAIN = answer([*FIRST, 5, 6])
NEXT = {
    "longer": PLAIN,
    "the same": answer(FIRST),
    "with spaces": answer([*FIRST, 5, 6], separators=(", ", ": ")),
    "a digit more": PLAIN.replace(b"1399,5", b"13995"),
    "shorter": answer(FIRST[:-1]),
    "named twice": PLAIN[:-1] + b',"prompt_token_ids":[7,8]}',
    "in the text": answer([9], text='"prompt_token_ids":' + json.dumps(FIRST, separators=(",", ":"))),
    "in another member first": b'{"x":{"prompt_token_ids":%b},%b'
    % (json.dumps(FIRST, separators=(",", ":")).encode(), answer([9])[1:]),
    "of a choice": b'{"choices":[{"message":{"content":"x"},"prompt_token_ids":%b}]}'
    % json.dumps([*FIRST, 3], separators=(",", ":")).encode(),
    "no number": PLAIN.replace(b"1399,5", b'1399,"5"'),
    "too large a number": PLAIN.replace(b"1399,5", b"1399,99999999999"),
    "cut off": PLAIN[:-20],
    "two commas": PLAIN.replace(b"1399,5", b"1399,,5"),
    "null": answer(None),
}


@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_a_blank_that_is_no_space_may_stand_before_a_comma(dialect):
    memo = {}
    for ids in (FIRST, [*FIRST, 5, 6], [*FIRST, 5, 6, 7]):
        listed = " \n,".join(map(str, ids))
        body = '{"choices":[{"text":"x","message":{},"\\u0070rompt_token_ids":[%s]}]}' % listed  # noqa: UP031
        assert list(CODECS[dialect].decode_reply(body.encode(), None, memo).prompt_ids) == ids


@pytest.mark.parametrize("following", NEXT)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_reply_means_the_same_after_any_other(following, separators):
    memo = {}
    outcome(answer(FIRST, separators=separators), memo)
    for body in (NEXT[following], PLAIN, NEXT[following], answer([*FIRST, 5, 6, 7], separators=separators)):
        assert outcome(body, memo) == outcome(body)


def test_known_ids_are_left_out_of_what_is_parsed():
    memo = {}
    outcome(answer(FIRST), memo)
    cut = cut_prompt(PLAIN, memo)
    assert cut is not None and len(cut.short) < len(PLAIN) - 5 * len(FIRST) + 100
    assert cut_prompt(answer(FIRST[1:]), memo) is None
