"""The short way to a Responses stream says what the long way says."""

import pytest

from rollyard.core.call import Reply, Usage
from rollyard.core.message import Message, Text
from rollyard.wire import CODECS
from rollyard.wire.codec import WireRequest

CODEC = CODECS["responses"]


@pytest.mark.parametrize("text", ["a", 'x%y %b @0@ "@4@" \u20ac\n', "w" * 8192, "w" * 8193])
@pytest.mark.parametrize("more", [b"", b',"temperature":0.5,"parallel_tool_calls":false', b',"max_output_tokens":7'])
def test_one_text_is_streamed_as_any_other_answer(text, more):
    body = b'{"model":"m \\" %b","input":"hi","stream":true' + more + b"}"
    call = CODEC.decode(WireRequest(call_id="call_x", rollout_id="r", body=body, headers={}, received_at=12.5))
    reply = Reply(message=Message("assistant", (Text(text),)), usage=Usage(prompt_tokens=3, completion_tokens=4))
    behind_the_opening = b"".join(CODEC.stream(call, reply, opened=True))
    assert b"".join(CODEC.stream(call, reply)) == CODEC.opening(call) + behind_the_opening
