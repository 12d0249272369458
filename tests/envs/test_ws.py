"""WebSocket frames of our own making, against the `websockets` package at the other end, and split at every place."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect as websocket
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, SERVER, Protocol

from rollyard.core.errors import EnvError, EnvUnavailable
from rollyard.envs import connect
from rollyard.envs.server import EnvServer
from rollyard.net.websocket import BINARY, PING, TEXT, Broken, Masks, WebSocketReader, frame
from rollyard.net.websocket_client import Lost, dial
from rollyard.net.websocket_proxied import dial_through
from rollyard.net.websocket_server import SocketProtocol
from rollyard.testing.serve import serve_app
from tests.envs.conftest import Counter, served

LIMIT = 10 * 2**20
messages = st.lists(st.tuples(st.sampled_from([TEXT, BINARY, PING]), st.integers(0, 4)), min_size=1, max_size=6)


@given(messages, st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_frames_come_out_whole_wherever_they_are_cut(wanted, masked, data):
    """The bytes are made by the `websockets` package, in fragments too, and read by ours."""
    made = b""
    expected = []
    for opcode, size in wanted:
        payload = b"x" * (5, 125, 126, 65535, 65536)[size]
        if opcode == PING:
            payload = payload[:125]
        expected.append((opcode, payload))
        cut = data.draw(st.integers(0, len(payload))) if opcode != PING and data.draw(st.booleans()) else None
        parts = [(opcode, True, payload)] if cut is None else [(opcode, False, payload[:cut]), (0, True, payload[cut:])]
        for kind, fin, part in parts:
            made += Frame(Opcode(kind), part, fin).serialize(mask=masked, extensions=[])
    reader, found, at = WebSocketReader(masked=masked, limit=LIMIT), [], 0
    while at < len(made):
        step = data.draw(st.integers(1, len(made)))
        found += reader.feed(made[at : at + step])
        at += step
    assert found == expected


@pytest.mark.parametrize("size", [0, 5, 125, 126, 65535, 65536, 3 * 2**20])
@pytest.mark.parametrize("masked", [True, False])
def test_what_we_send_the_websockets_package_reads(size, masked):
    payload = b"y" * size
    protocol = Protocol(SERVER if masked else CLIENT, max_size=LIMIT)
    protocol.receive_data(frame(TEXT, payload, Masks().next() if masked else None))
    [read] = protocol.events_received()
    assert (read.opcode, read.fin, bytes(read.data)) == (Opcode.TEXT, True, payload)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (bytes((0xC1, 0x80, 0, 0, 0, 0)), 1002),  # a reserved bit
        (bytes((0x83, 0x80, 0, 0, 0, 0)), 1002),  # an unknown kind
        (bytes((0x81, 0x00, 0, 0, 0, 0)), 1002),  # not masked
        (bytes((0x09, 0x80, 0, 0, 0, 0)), 1002),  # a ping in pieces
        (bytes((0x80, 0x80, 0, 0, 0, 0)), 1002),  # the end of nothing
        (bytes((0x81, 0xFF)) + (2**62).to_bytes(8, "big") + bytes(4), 1009),
    ],
)
def test_what_breaks_the_protocol_is_named(data, code):
    with pytest.raises(Broken) as caught:
        WebSocketReader(masked=True, limit=LIMIT).feed(data)
    assert caught.value.code == code


@pytest.mark.anyio
async def test_our_server_with_the_websockets_client_ping_large_and_close():
    async with served() as url, websocket(url.replace("http", "ws") + "/ws", max_size=None) as socket:
        await asyncio.wait_for(await socket.ping(b"there?"), 30)
        large = {"type": "reset", "data": {"words": "z" * 300_000}}
        await socket.send(json.dumps(large))
        assert len(await asyncio.wait_for(socket.recv(), 30)) > 300_000
        await socket.send(iter(['{"type":', '"state"}']))  # in fragments
        assert json.loads(await asyncio.wait_for(socket.recv(), 30))["type"] == "state"
        await socket.send('{"type":"close"}')
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(socket.recv(), 30)
        assert socket.close_code == 1000


@pytest.mark.anyio
async def test_the_application_also_runs_under_plain_asgi_sockets():
    app = EnvServer(Counter, key="boss")
    async with serve_app(app, lifespan="on", ws="websockets-sansio") as url:
        async with connect(url, key="boss") as env:
            await env.reset(seed=2)
            assert (await env.step({"add": 1})).observation == {"total": 3}
        with pytest.raises(EnvError, match="refuses this key"):
            async with connect(url, key="wrong"):
                pass


@pytest.mark.anyio
@pytest.mark.parametrize("through", [False, True])
async def test_our_socket_with_the_websockets_server(through):
    """Both of the client's sockets: its own, and the one for proxies."""

    async def answer(socket):
        async for text in socket:
            await socket.send(f"heard {len(text)}")
            if text == "end":
                await socket.close(1001)

    async with serve(answer, "127.0.0.1", 0, subprotocols=["rollyard.v1"], max_size=None) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/ws"
        if through:
            socket = await dial_through(url, subprotocol="rollyard.v1", headers={}, ping_s=20)
        else:
            socket = await dial(url, subprotocol="rollyard.v1", headers={}, connect_s=30, ping_s=20)
        assert socket.subprotocol == "rollyard.v1"
        for size in (0, 200, 70_000):
            socket.send(b"q" * size)
            assert await asyncio.wait_for(socket.recv(), 30) == b"heard %d" % size
        assert socket.pending() is None
        socket.send(b"end")
        assert await asyncio.wait_for(socket.recv(), 30) == b"heard 3"
        with pytest.raises(Lost):
            await asyncio.wait_for(socket.recv(), 30)
        await socket.close()


@pytest.mark.anyio
async def test_a_server_that_is_no_websocket_is_unavailable_and_a_header_cannot_break_out():
    async def rude(reader, writer):
        await reader.readline()
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(rude, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(EnvUnavailable):
            async with connect(url):
                pass
        with pytest.raises(EnvError, match="line break"):
            async with connect(url, headers={"x": "a\r\nb: c"}):
                pass


@pytest.mark.anyio
async def test_a_peer_that_vanished_without_a_word_is_let_go():
    """A half-open connection would hold a place for ever: it does not answer pings."""
    app = EnvServer(Counter)
    pings = {"ws": SocketProtocol, "ws_ping_interval": 0.2, "ws_ping_timeout": 0.4}
    async with serve_app(app, lifespan="on", **pings) as url:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(
            b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert b"101" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert await asyncio.wait_for(reader.read(), 30)  # pings, then the end
        writer.close()
        async with connect(url, ping_s=0.2) as env:
            await env.reset()
            await asyncio.sleep(1.5)  # one that answers stays
            assert (await env.step({"add": 1})).observation == {"total": 1}
