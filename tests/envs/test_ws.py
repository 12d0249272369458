"""Our two ends of a WebSocket against the `websockets` package at the other end, and against bytes that break the protocol."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import connect as websocket
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from rollyard.core.errors import EnvError, EnvUnavailable
from rollyard.envs import connect
from rollyard.envs.server import EnvServer
from rollyard.net.websocket_client import Lost, dial
from rollyard.net.websocket_proxied import dial_through
from rollyard.net.websocket_server import SocketProtocol
from rollyard.testing.serve import serve_app
from tests.envs.conftest import Counter, served

HELLO = (
    b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.mark.anyio
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
async def test_what_breaks_the_protocol_is_closed_with_its_code(data, code):
    async with served() as url:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(HELLO)
        assert b"101" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        writer.write(data)
        said = await asyncio.wait_for(reader.read(), 30)
        assert said[0] == 0x88 and int.from_bytes(said[2:4], "big") == code
        writer.close()


@pytest.mark.anyio
async def test_a_message_comes_out_whole_when_it_arrives_byte_by_byte_and_in_fragments():
    text = b'{"type":"state"}'
    parts = [Frame(Opcode.TEXT, text[:5], fin=False), Frame(Opcode.PING, b"x"), Frame(Opcode.CONT, text[5:])]
    async with served() as url:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        for byte in HELLO + b"".join(part.serialize(mask=True, extensions=[]) for part in parts):
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert await asyncio.wait_for(reader.readexactly(3), 30) == b"\x8a\x01x"
        assert (await asyncio.wait_for(reader.readexactly(2), 30))[0] == 0x81
        writer.close()


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
        async with connect(url, ping_s=0.2) as env:
            await env.reset()
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(HELLO)
            assert b"101" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert await asyncio.wait_for(reader.read(), 30)  # pings, then the end
            writer.close()
            # one that answers was asked as often, and stays
            assert (await env.step({"add": 1})).observation == {"total": 1}
