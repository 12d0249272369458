"""A frame is one event of the standard's grammar, whatever its data holds."""

from hypothesis import given
from hypothesis import strategies as st

from rollyard.wire.sse import COMMENT, DONE, frame

from .stream_reader import read_events

payload = st.binary(max_size=20).filter(lambda data: not set(data) & {10, 13})


@given(payload, st.sampled_from([None, "ping"]))
def test_a_frame_is_one_event(data, name):
    framed = frame(data, name)
    assert framed.endswith(b"\n\n") and framed.count(b"\n\n") == 1
    assert read_events(COMMENT + framed + DONE) == [data, b"[DONE]"]
    assert framed.startswith(b"event: ping\n") == (name == "ping")
