"""The parser of server-sent events gives the same events however the bytes are cut."""

from hypothesis import given
from hypothesis import strategies as st

from rollyard.wire.sse import SseEvent, SseParser, frame

payload = st.binary(max_size=20).filter(lambda b: not set(b) & {10, 13})
endings = st.sampled_from([b"\n", b"\r", b"\r\n"])


@st.composite
def streams(draw):
    """Bytes of a stream, and the events it holds."""
    out, events = [], []
    for _ in range(draw(st.integers(0, 5))):
        end = draw(endings)
        lines = draw(st.lists(payload, min_size=1, max_size=3))
        name = draw(st.sampled_from(["", "ping", "a b"]))
        if draw(st.booleans()):
            out.append(b": a comment" + end)
        if name:
            out.append(b"event: " + name.encode() + end)
        for line in lines:
            out.append(b"data: " + line + end)
        out.append(b"retry: 3" + end + end)
        events.append(SseEvent(b"\n".join(lines), name or "message"))
    return b"".join(out), events


@given(streams(), st.data())
def test_every_split_gives_the_same_events(stream, data):
    body, events = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    parser, found = SseParser(), []
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        found += parser.feed(body[start:end])
    assert found + parser.close() == events


@given(streams())
def test_one_byte_at_a_time(stream):
    body, events = stream
    parser = SseParser()
    assert [e for i in range(len(body)) for e in parser.feed(body[i : i + 1])] + parser.close() == events


def test_an_event_without_its_blank_line_is_read_at_the_end():
    parser = SseParser()
    assert parser.feed(b"data: x") == []
    assert parser.close() == [SseEvent(b"x")]


def test_a_value_loses_one_space_and_keeps_its_colons():
    assert SseParser().feed(b"data:  a:b\n\ndata:c\n\n") == [SseEvent(b" a:b"), SseEvent(b"c")]


def test_a_byte_order_mark_is_skipped_once():
    assert SseParser().feed(b"\xef\xbb\xbfdata: x\n\n") == [SseEvent(b"x")]


def test_an_event_with_no_data_is_no_event():
    assert SseParser().feed(b"event: ping\n\n: c\n\nid: 4\n\n") == []


@given(payload, st.sampled_from([None, "ping"]))
def test_a_frame_parses_to_itself(data, name):
    assert SseParser().feed(frame(data, name)) == [SseEvent(data, name or "message")]
