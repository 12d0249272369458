"""Every parser that reads hostile bytes, fed with mutations of what it expects: it gives a value or its own error, for
`ROLLYARD_FUZZ_S` seconds each (20 without it), and never anything else. A failing input is printed whole."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
from types import SimpleNamespace

import msgspec
import pytest
from websockets.frames import Frame, Opcode

from rollyard.core.errors import Error, GateError, UpstreamError
from rollyard.images import dockerfile
from rollyard.images.archives import open_archive, unpack
from rollyard.images.oci import ArchiveBlobs, read_image
from rollyard.net.http_server import HttpConnection, HttpLimits
from rollyard.net.websocket_server import EXTENSION, SocketProtocol
from rollyard.tasks.harbor.load import load_folder
from rollyard.wire import CODECS
from rollyard.wire.codec import WireRequest
from tests.fuzz.mutations import fuzzed

pytestmark = [pytest.mark.slow, pytest.mark.adversarial]


# -- HTTP


class Wire:
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        self.closed, self.sent = False, b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Service:
    """Answers some requests at once and others when the connection is looked at again."""

    limits = HttpLimits(body=10_000)

    def __init__(self) -> None:
        self.late = []

    def connected(self, connection) -> bool:
        return True

    def lost(self, connection) -> None: ...

    def begin(self, exchange) -> None:
        if b"x-refuse" in exchange.headers:
            exchange.keep_alive = False
            exchange.respond(401, b"{}")

    def complete(self, exchange) -> None:
        if b"x-late" in exchange.headers:
            self.late.append(exchange)
        else:
            exchange.respond(200, exchange.body)

    def refusal(self, exchange, status, why) -> bytes:
        return why.encode()


REQUESTS = [
    b"POST /v1/x?a=b HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello" * 3,
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nx-late: 1\r\n\r\n5\r\nhello\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    b"GET /%41 HTTP/1.0\r\nconnection: keep-alive\r\nexpect: 100-continue\r\nx-refuse: 1\r\ncontent-length: 3\r\n\r\nabc",
]


def serve(data: bytes) -> None:
    service, wire = Service(), Wire()
    connection = HttpConnection(service, lambda: 1.0)
    connection.connection_made(wire)
    cut = len(data) // 3
    for part in (data[:cut], data[cut : 2 * cut], data[2 * cut :]):
        if part and not wire.closed:
            connection.data_received(part)
        for exchange in service.late:
            exchange.respond(200, b"late")
        service.late.clear()
    connection.tick(1e9)
    connection.connection_lost(None)
    assert len(wire.sent) < 200_000


def test_http():
    fuzzed(serve, REQUESTS)


# -- WebSocket


HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def frame(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def test_websocket():
    said = frame(Opcode.TEXT, b"hello") + frame(Opcode.PING, b"") + frame(Opcode.CLOSE, b"\x03\xe8bye")
    parts = frame(Opcode.TEXT, b"a", False) + frame(Opcode.PING, b"") + frame(Opcode.CONT, b"b")
    seeds = [HANDSHAKE + said, HANDSHAKE + frame(Opcode.BINARY, b"x" * 70_000), HANDSHAKE + parts]

    async def application(scope, receive, send) -> None:
        peer = scope["extensions"][EXTENSION]
        await peer.accept()
        while await peer.receive() is not None:
            pass

    async def serve(data: bytes) -> None:
        config = SimpleNamespace(ws_max_size=100_000, ws_ping_interval=None, root_path="", loaded_app=application)
        state, wire = SimpleNamespace(connections=set(), tasks=set()), Wire()
        connection = SocketProtocol(config, state, {})
        connection.connection_made(wire)
        for start in range(0, len(data), 5000):
            if not wire.closed:
                connection.data_received(data[start : start + 5000])
            await asyncio.sleep(0)
        tasks = list(state.tasks)
        connection.eof_received()
        connection.connection_lost(None)
        await asyncio.gather(*tasks)
        assert len(wire.sent) < 200_000

    loop = asyncio.new_event_loop()
    try:
        fuzzed(lambda data: loop.run_until_complete(serve(data)), seeds)
    finally:
        loop.close()


# -- the JSON dialects, from agents and from model servers

TEXT = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}]}
]
BODIES = {
    "chat": {
        "model": "m",
        "messages": TEXT,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "store": False,
    },
    "completions": {"model": "m", "prompt": [1, 2, 3], "logprobs": 1},
    "responses": {"model": "m", "input": [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": []}]},
    "messages": {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}],
    },
    "gemini": {"contents": [{"parts": [{"text": "hi"}, {"functionCall": {"name": "f", "args": {}}}]}]},
}
ANSWERS = {
    "chat": {"choices": [{"message": {"content": "x"}, "logprobs": {"content": [{"token": "x", "logprob": -1}]}}]},
    "completions": {"choices": [{"text": "x", "logprobs": {"tokens": ["x"], "token_logprobs": [-1]}}]},
    "responses": {
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "x"}]}],
        "status": "completed",
    },
    "messages": {"content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn", "usage": {"input_tokens": 1}},
    "gemini": {"candidates": [{"content": {"parts": [{"text": "x"}]}, "finishReason": "STOP"}]},
}


@pytest.mark.parametrize("dialect", list(BODIES))
def test_requests_of_agents(dialect):
    def read(data: bytes) -> None:
        request = WireRequest(call_id="c", rollout_id="r", body=data, headers={}, model="m", stream=False)
        call = CODECS[dialect].decode(request)
        CODECS[dialect].encode_request(call, model="m", sampling=call.sampling, extra={})

    fuzzed(read, [json.dumps(BODIES[dialect]).encode()], GateError)


@pytest.mark.parametrize("dialect", list(ANSWERS))
def test_answers_of_model_servers(dialect):
    fuzzed(CODECS[dialect].decode_reply, [json.dumps(ANSWERS[dialect]).encode()], UpstreamError)


# -- archives, images, tasks


def tar_bytes(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "../../etc"
        archive.addfile(link)
    return out.getvalue()


def test_tars(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("safe")

    def read(data: bytes) -> None:
        root = tmp_path / f"root{chance.randint(0, 3)}"
        root.mkdir(exist_ok=True)
        try:
            unpack(io.BytesIO(data), root)
        finally:
            assert outside.read_text() == "safe" and {p.name for p in tmp_path.iterdir()} <= kept

    chance, kept = random.Random(1), {"outside", *(f"root{n}" for n in range(4))}
    plain = tar_bytes({"a/b": b"x" * 600, "link/c": b"y", "../d": b"z"})
    seeds = [plain, gzip.compress(plain), bz2.compress(plain), lzma.compress(plain)]
    fuzzed(read, seeds, Error, OSError)


def test_oci_images():
    digest = "sha256:" + "0" * 64
    index = {"manifests": [{"digest": digest, "mediaType": "application/vnd.oci.image.manifest.v1+json"}]}
    manifest = {"config": {"digest": digest}, "layers": [{"digest": digest, "mediaType": "application/x-tar"}]}
    docker = [{"Config": "c.json", "Layers": ["l.tar"], "RepoTags": ["a:b"]}]
    seeds = [
        tar_bytes(
            {"index.json": json.dumps(index).encode(), f"blobs/sha256/{'0' * 64}": json.dumps(manifest).encode()}
        ),
        tar_bytes(
            {
                "manifest.json": json.dumps(docker).encode(),
                "c.json": b'{"config": {"Env": ["A=b"]}, "rootfs": {"diff_ids": ["x"]}}',
                "l.tar": b"",
            }
        ),
    ]

    seeds += [gzip.compress(seeds[0]), lzma.compress(seeds[1])]

    def read(data: bytes) -> None:
        with open_archive(io.BytesIO(data)) as archive:
            read_image(ArchiveBlobs(archive))

    fuzzed(read, seeds, Error)


def test_dockerfiles():
    seeds = [
        b"# syntax=x\nARG A=1\nFROM python:$A AS b\n"
        b"RUN --mount=type=cache,target=/x echo 'a b' \\\n  && true\nENV X=\"y z\" W=1\n",
        b'FROM b\nCOPY --from=b <<EOF /x\nhello\nEOF\nRUN ["sh", "-c", "x"]\nENTRYPOINT x ${Y:-z}\nUSER a:b\n',
    ]
    fuzzed(lambda data: dockerfile.parse(data.decode("utf-8", "replace"), file="Dockerfile"), seeds, Error)


def test_task_folders(tmp_path):
    (tmp_path / "instruction.md").write_text("do it")
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "Dockerfile").write_text("FROM x\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text("true\n")
    seed = b'version = "1.0"\n[metadata]\na = "b"\n[verifier]\ntimeout_sec = 10.0\n'
    seed += b"[agent]\ntimeout_sec = 5\n[environment]\ncpus = 1\n"

    def read(data: bytes) -> None:
        (tmp_path / "task.toml").write_bytes(data)
        load_folder(tmp_path)

    fuzzed(read, [seed, seed + b'memory_mb = 100\nallow_internet = true\n[[steps]]\nname = "x"\n'], Error)


# -- what a program in a sandbox sends the host's relay


def test_relay_frames():
    from rollyard.inside.relay import frames

    seeds = [b"\0\0\0\x01\x01\0\0\0\x05hello" * 3, bytes(range(64))]

    async def taken(data: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        async for _ in frames(reader):
            pass

    fuzzed(lambda data: asyncio.run(taken(data)), seeds, asyncio.IncompleteReadError, ValueError, msgspec.MsgspecError)


def test_a_parser_that_breaks_is_found():
    """The fuzzing itself: a parser with a flaw does not pass."""

    def flawed(data: bytes) -> None:
        if b"\xff" in data:
            raise KeyError("a flaw")

    with pytest.raises(KeyError):
        fuzzed(flawed, [b"hello"], ValueError)
