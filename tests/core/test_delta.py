"""A difference gives back exactly the body it stands for."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rollyard.core.delta import ANCHORS, apply, common_prefix, common_suffix, difference

CHUNKS = st.sampled_from([*ANCHORS, b"a" * 40, b"b" * 5000, b"ab" * 3000, b"", b"\0", b'"', b"c" * 31])
BODIES = st.lists(st.one_of(CHUNKS, st.binary(max_size=50)), max_size=12).map(b"".join)


@given(BODIES, BODIES)
def test_any_body_comes_back(base, body):
    delta = difference(b"base", base, body)
    if delta is not None:
        assert apply(delta, base) == body
        assert delta.whole == len(body)
        assert delta.size * 2 <= len(body)


@given(BODIES, BODIES)
def test_common_parts_are_as_long_as_they_can_be(a, b):
    head, tail = common_prefix(a, b), common_suffix(a, b)
    assert a[:head] == b[:head] and a[head : head + 1] != b[head : head + 1] or head == min(len(a), len(b))
    assert a[len(a) - tail :] == b[len(b) - tail :]
    assert tail == min(len(a), len(b)) or a[len(a) - tail - 1] != b[len(b) - tail - 1]


def request(turns, marked):
    """As an agent sends it: the history grows in the middle, tools follow, a cache mark moves."""
    messages = [{"role": "system", "content": "s" * 20_000}]
    messages += [{"role": "tool", "content": f"result {n} " * 50} for n in range(turns)]
    messages[marked]["cache_control"] = {"type": "ephemeral"}
    return json.dumps({"max_tokens": 1, "messages": messages, "tools": ["t" * 9000]}).encode()


def test_a_growing_request_costs_what_is_new_even_when_a_cache_mark_moves():
    delta = difference(b"base", request(20, 20), request(22, 22))
    assert delta is not None and delta.size < 3000


def test_an_engines_answer_costs_no_more_for_a_longer_prompt():
    def answer(n):
        return json.dumps({"id": f"x{n}", "choices": ["q" * 3000], "prompt_token_ids": list(range(n))}).encode()

    delta = difference(b"base", answer(9000), answer(9200))
    assert delta is not None and delta.size < 6000
