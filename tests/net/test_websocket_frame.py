"""A connection that reads and writes small frames by itself, beside the `websockets` package's protocol alone.

Whatever bytes come, in whatever pieces, both hand over the same messages, write the same frames, and end in the same way.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from rollyard.net.websocket import WebSocketConnection, WebSocketMessages
from rollyard.net.websocket_frame import SMALL, Masks, write_text

LIMIT = 400
URI = parse_uri("ws://127.0.0.1/ws")
BOTH = pytest.mark.parametrize("side", [Side.SERVER, Side.CLIENT], ids=["server", "client"])
CLOSE = object()  # in a list of reads: this end says goodbye here


class KeepingTransport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += bytes(data)

    def close(self):
        self.closed = True


class CountingServer(ServerProtocol):
    parsed = 0

    def receive_data(self, data):
        self.parsed += 1
        super().receive_data(data)


class CountingClient(ClientProtocol):
    parsed = 0

    def receive_data(self, data):
        self.parsed += 1
        super().receive_data(data)


class OurEnd(WebSocketConnection):
    def __init__(self, side, limit=LIMIT):
        self.protocol = new_protocol(side, limit)
        super().__init__(self.protocol)
        self.wire, self.received = KeepingTransport(), []
        self.connection_made(self.wire)

    def feed(self, data):
        if data is CLOSE:
            self.protocol.send_close(1000)
            self._flush()
        else:
            self.data_received(data)

    def _opening(self, event):
        accept(self.protocol, event)

    def _take(self, message):
        self.received.append(message)

    @property
    def ended(self):
        return self.wire.closed

    @property
    def written(self):
        return self.wire.written


class TheirEnd:
    """The package's protocol, with as little around it as can be."""

    def __init__(self, side, limit=LIMIT):
        self.protocol = new_protocol(side, limit)
        self.messages, self.received, self.written = WebSocketMessages(), [], b""

    def feed(self, data):
        self.protocol.send_close(1000) if data is CLOSE else self.protocol.receive_data(data)
        for event in self.protocol.events_received():
            if not isinstance(event, Frame):
                accept(self.protocol, event)
            elif (message := self.messages.add(event)) is not None:
                self.received.append(message)
        self.written += b"".join(self.protocol.data_to_send())

    @property
    def ended(self):
        return self.protocol.close_rcvd is not None or self.protocol.parser_exc is not None


def new_protocol(side, limit):
    if side is Side.SERVER:
        return CountingServer(max_size=limit)
    return CountingClient(URI, max_size=limit)


def accept(protocol, event):
    if isinstance(protocol, ServerProtocol):
        protocol.send_response(protocol.accept(event))


def handshake_for(protocol):
    """What the other end sends first."""
    if isinstance(protocol, ServerProtocol):
        other = ClientProtocol(URI)
        other.send_request(other.connect())
    else:
        protocol.send_request(protocol.connect())
        other = ServerProtocol()
        other.receive_data(b"".join(protocol.data_to_send()))
        accept(other, *other.events_received())
    return b"".join(other.data_to_send())


def outcome(end, reads, behind_handshake=b"", cut=None):
    """What an end made of these reads, with some bytes right behind the handshake and a cut somewhere in it all."""
    first = handshake_for(end.protocol) + behind_handshake
    for data in [first] if cut is None else [first[:cut], first[cut:]]:
        if data:
            end.feed(data)
    for data in reads:
        if end.ended or (data is CLOSE and end.protocol.state is not State.OPEN):
            break
        end.feed(data)
    protocol = end.protocol
    written = end.written
    if protocol.side is Side.SERVER:
        written = written.partition(b"\r\n\r\n")[2]
    other = Protocol(Side.CLIENT if protocol.side is Side.SERVER else Side.SERVER)  # masks are random: compare without
    other.receive_data(written)
    error = protocol.parser_exc
    closes = (protocol.close_rcvd, protocol.close_sent, protocol.state, end.ended, type(error), str(error))
    return end.received, [f for f in other.events_received() if isinstance(f, Frame)], other.parser_exc, closes


def wire_frame(head, payload, masked, length_bytes=0, declared=None):
    """A frame of any first byte; `length_bytes` beyond what is needed, and another length than it has."""
    length = len(payload) if declared is None else declared
    flag = 0x80 if masked else 0
    if length_bytes == 8 or length >= 65536:
        start = bytes((head, flag | 127)) + length.to_bytes(8, "big")
    elif length_bytes == 2 or length >= 126:
        start = bytes((head, flag | 126)) + length.to_bytes(2, "big")
    else:
        start = bytes((head, flag | length))
    if not masked:
        return start + payload
    key = b"\x0d\x0a\x0d\x0a"  # the end of a handshake, to confuse whoever looks for one
    return start + key + bytes(b ^ key[i % 4] for i, b in enumerate(payload))


def heads():
    whole = st.sampled_from([0x81, 0x82])
    parts = st.sampled_from([0x01, 0x02, 0x00, 0x80])
    control = st.sampled_from([0x88, 0x89, 0x8A, 0x09])
    return st.one_of(whole, whole, whole, parts, control, st.integers(0, 255))


def payloads():
    goodbye = st.sampled_from([b"", b"\x03\xe8", b"\x03\xe8bye", b"\x03\xed", b"\x00", b"\x03\xe8\xff\xfe"])
    sizes = st.sampled_from([0, 1, 4, 124, 125, 126, 127, LIMIT - 1, LIMIT, LIMIT + 1])
    text = st.builds(lambda size, byte: bytes((byte,)) * size, sizes, st.sampled_from([0x61, 0xFF, 0xC3]))
    return st.one_of(st.binary(max_size=12), text, goodbye)


@st.composite
def frames(draw, masked):
    right = masked if draw(st.integers(0, 15)) else not masked
    longer = draw(st.sampled_from([0] * 8 + [2, 8]))
    declared = draw(st.sampled_from([None] * 20 + [2**40, 2**63, LIMIT + 1, 3]))
    return wire_frame(draw(heads()), draw(payloads()), right, longer, declared)


@st.composite
def conversations(draw):
    """A side, and its reads: frame by frame for the most part, else cut anywhere, and perhaps a goodbye between."""
    side = draw(st.sampled_from([Side.SERVER, Side.CLIENT]))
    sent = draw(st.lists(frames(side is Side.SERVER), max_size=6))
    stream = b"".join(sent)
    how = draw(st.sampled_from(["frames", "frames", "cuts", "bytes"]))
    if how == "frames":
        reads = [*sent]
    elif how == "bytes":
        reads = [bytes((byte,)) for byte in stream]
    else:
        cuts = sorted({0, len(stream), *draw(st.lists(st.integers(0, len(stream)), max_size=5))})
        reads = [stream[a:b] for a, b in pairwise(cuts)]
    if draw(st.integers(0, 5)) == 0:
        reads.insert(draw(st.integers(0, len(reads))), CLOSE)
    return side, reads


@given(conversations())
@settings(max_examples=300, deadline=None)
def test_any_bytes_in_any_pieces_come_to_what_the_package_makes_of_them(conversation):
    side, reads = conversation
    assert outcome(OurEnd(side), reads) == outcome(TheirEnd(side), reads)


def one_frame_of_each_kind(masked):
    kinds = [
        (0x81, b"first", 0),
        (0x82, b"\xff\x00" * 80, 0),
        (0x89, b"ping", 0),
        (0x01, b"in ", 0),
        (0x8A, b"pong between", 0),
        (0x80, b"pieces", 0),
        (0x81, b"long length", 8),
        (0x81, b"", 0),
        (0x88, b"\x03\xe8bye", 0),
    ]
    return [wire_frame(head, payload, masked, longer) for head, payload, longer in kinds]


@BOTH
def test_a_stream_cut_in_two_at_every_byte_is_the_same_stream(side):
    stream = b"".join(one_frame_of_each_kind(side is Side.SERVER))
    whole = outcome(TheirEnd(side), [stream])
    assert whole[0] == [b"first", b"\xff\x00" * 80, b"in pieces", b"long length", b""]
    for cut in range(len(stream) + 1):
        assert outcome(OurEnd(side), [data for data in (stream[:cut], stream[cut:]) if data]) == whole, cut


@BOTH
def test_a_handshake_cut_at_every_byte_with_half_a_frame_behind_it(side):
    sent = one_frame_of_each_kind(side is Side.SERVER)
    for behind in (0, 1, 7, len(sent[0]) + 3):
        stream = b"".join(sent)
        reads = [stream[behind:], *sent[:1]]
        whole = outcome(TheirEnd(side), reads, stream[:behind])
        handshake = len(handshake_for(new_protocol(side, LIMIT)))
        for cut in range(1, handshake + behind):
            assert outcome(OurEnd(side), reads, stream[:behind], cut) == whole, (behind, cut)


@BOTH
@pytest.mark.parametrize("with_handshake", [False, True])
def test_the_rest_of_a_frame_is_not_taken_for_a_frame_however_much_it_looks_like_one(side, with_handshake):
    masked = side is Side.SERVER
    inner = wire_frame(0x81, b"a whole frame", masked)
    outer = wire_frame(0x82, b"", masked, declared=len(inner))
    behind, reads = (outer, [inner, inner]) if with_handshake else (b"", [inner, outer, inner, inner])
    ours = outcome(OurEnd(side), reads, behind)
    assert ours == outcome(TheirEnd(side), reads, behind)
    assert ours[0][-1] == b"a whole frame" != ours[0][-2]


@BOTH
@pytest.mark.parametrize(
    ("head", "payload", "wrong_mask", "declared", "code"),
    [
        (0xC1, b"x", False, None, 1002),  # a reserved bit
        (0xA1, b"x", False, None, 1002),
        (0x91, b"x", False, None, 1002),
        (0x83, b"x", False, None, 1002),  # an unknown kind
        (0x80, b"x", False, None, 1002),  # the end of nothing
        (0x81, b"x", True, None, 1002),
        (0x82, b"x" * 200, True, None, 1002),
        (0x81, b"x" * 9, True, 5, 1002),  # with a mask it would be just as long
        (0x81, b"x" * (LIMIT + 1), False, None, 1009),
        (0x81, b"x", False, 2**40, 1009),
        (0x88, b"\x03\xe8\xff", False, None, 1007),  # a goodbye that is no UTF-8
        (0x88, b"\x03", False, None, 1002),
    ],
)
def test_a_wrong_frame_among_small_ones_closes_with_the_code_of_the_package(
    side, head, payload, wrong_mask, declared, code
):
    masked = side is Side.SERVER
    good = wire_frame(0x81, b"good", masked)
    reads = [good, wire_frame(head, payload, masked is not wrong_mask, declared=declared), good]
    ours = outcome(OurEnd(side), reads)
    assert ours == outcome(TheirEnd(side), reads)
    assert ours[0] == [b"good"]
    assert ours[3][1].code == code


@BOTH
def test_whole_small_frames_do_not_go_through_the_parser_also_after_one_in_pieces(side):
    end, masked = OurEnd(side), side is Side.SERVER
    small, large = wire_frame(0x81, b"small", masked), wire_frame(0x82, b"x" * 300, masked)
    reads = [small, large, small[:3], small[3:], small, wire_frame(0x89, b"", masked), large, small]
    assert outcome(end, reads)[0] == [b"small", b"x" * 300, b"small", b"small", b"x" * 300, b"small"]
    assert end.protocol.parsed == 4  # the handshake, the two pieces and the ping


@BOTH
@pytest.mark.parametrize("size", [0, 1, 125, 126, 300, SMALL - 1, SMALL, SMALL + 1])
def test_what_is_sent_is_what_the_package_would_send(side, size):
    end, text = OurEnd(side), "é".encode() * (size // 2) + b"x" * (size % 2)
    outcome(end, [])
    end.wire.written = b""
    end.send(text)
    if side is Side.SERVER:
        assert end.written == Frame(Opcode.TEXT, text).serialize(mask=False)
        return
    other = Protocol(Side.SERVER)
    other.receive_data(end.written)
    assert other.events_received() == [Frame(Opcode.TEXT, text)]
    assert len(end.written) == len(Frame(Opcode.TEXT, text).serialize(mask=True))


def test_nothing_is_sent_after_the_goodbye():
    end = OurEnd(Side.SERVER)
    outcome(end, [CLOSE])
    before = end.written
    end.send(b"more")
    assert end.written == before


def test_every_frame_of_a_client_has_a_mask_of_its_own():
    masks = Masks()
    drawn = [masks.draw() for _ in range(1000)]
    assert {len(mask) for mask in drawn} == {4}
    assert len(set(drawn)) > 990
    assert write_text(b"\0\0\0\0\0", drawn[0])[2:] == drawn[0] + drawn[0] + drawn[0][:1]
