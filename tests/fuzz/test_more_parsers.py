"""The parsers of what sandboxes, authors and other owners send beside the protocols of `test_parsers.py`: each gives a value or
its own error, whatever the bytes are, for `ROLLYARD_FUZZ_S` seconds."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import struct
import zipfile

import pytest

from rollyard import agents
from rollyard.agents.events import EventParser
from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import Error, PlaneInvalid, UpstreamError
from rollyard.core.protocols import RawResponse
from rollyard.gate.answer_check import AnswerCheck
from rollyard.net.egress import dns
from rollyard.net.egress.client_hello import read_hello
from rollyard.net.egress.http_request import Incoming, MalformedRequest, forward_body, parse_head
from rollyard.net.websocket_frame import read_message
from rollyard.plane.client.push import unpack
from rollyard.plane.compat.e2b.connect_frames import message, only_message
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.fleet.errors import FleetRefusal
from rollyard.plane.compat.fleet.verifiers import unpack_code
from rollyard.plane.service.cursors import read_cursor, write_cursor
from rollyard.policy.key_scrubber import KeyScrubber
from rollyard.tasks.harbor.compose import read_services
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.rows import from_fleet, from_jsonl
from rollyard.tasks.verifiers import harbor, rewards, test_record
from rollyard.train.service.request import ServiceDefaults, read_request, tasks_of
from tests.fuzz.mutations import fuzzed
from tests.fuzz.test_parsers import tar_bytes

pytestmark = [pytest.mark.slow, pytest.mark.adversarial]


class Pieces:
    """A stream of these bytes, a few at a time."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def receive(self, most: int) -> bytes:
        piece, self.data = self.data[:100], self.data[100:]
        return piece


# -- what the proxy of a sandbox's network reads


def test_requests_to_the_proxy():
    async def read(data: bytes) -> None:
        incoming, sent = Incoming(Pieces(data)), bytearray()

        async def send(piece: bytes) -> None:
            sent.extend(piece)

        head = parse_head(await incoming.until(b"\r\n\r\n", 10_000))
        head.authority(80)
        assert head.write().count(b"\r\n\r\n") == 1
        await forward_body(head, incoming, send)

    seeds = [
        b"GET http://a.test:80/x?y HTTP/1.1\r\nHost: a.test\r\nAccept: */*\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n",
        b"GET http://[::1]:80/ HTTP/1.1\r\nHost: [::1]\r\nUpgrade: websocket\r\nContent-Length: 3\r\n\r\nabc",
    ]
    fuzzed(lambda data: asyncio.run(read(data)), seeds, MalformedRequest)


def test_first_messages_of_tls():
    name = b"a.test"
    entry = b"\0" + struct.pack("!H", len(name)) + name
    extension = struct.pack("!HHH", 0, len(entry) + 2, len(entry)) + entry
    body = (
        b"\x03\x03" + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0" + struct.pack("!H", len(extension)) + extension
    )
    hello = b"\x01" + len(body).to_bytes(3) + body
    whole = b"\x16\x03\x01" + struct.pack("!H", len(hello)) + hello
    split = b"".join(b"\x16\x03\x01" + struct.pack("!H", len(part)) + part for part in (hello[:20], hello[20:]))
    found = read_hello(whole)
    assert found is not None and found.name == "a.test"
    fuzzed(read_hello, [whole, split], ValueError)


def test_questions_to_dns():
    async def ask(data: bytes) -> None:
        async def place(name: str) -> str:
            return "127.0.0.2"

        async def refuse(name: str, why: str) -> None: ...

        given = await dns.answer(data, lambda name: name.endswith("test"), place, refuse)
        assert given is None or len(given) <= len(data) + 16

    question = struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0) + b"\x01a\x04test\0" + struct.pack("!HH", 1, 1)
    fuzzed(lambda data: asyncio.run(ask(data)), [question, question[:-4] + struct.pack("!HH", 28, 1)])


# -- streams of model servers


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_streams_of_model_servers(kind):
    def read(data: bytes) -> None:
        check = AnswerCheck(RawResponse(status=200, headers={"Content-Type": kind}, body=None))
        scrub = KeyScrubber("sk-secret", "gzip" if data[:2] == b"\x1f\x8b" else "")
        out = b""
        for start in range(0, len(data), 30):
            out += scrub.feed(data[start : start + 30])
            check.feed(data[start : start + 30])
        out += scrub.finish()
        assert b"sk-secret" not in out
        check.problem()

    plain = b'event: message\ndata: {"choices": [{"finish_reason": "stop"}], "key": "sk-secret"}\n\ndata: [DONE]\n\n'
    failed = b'event: error\ndata: {"type": "error", "error": {"message": "no sk-secret"}}\n\n'
    fuzzed(read, [plain, failed, gzip.compress(plain)], UpstreamError)


# -- what programs in a sandbox say and leave


def test_what_tests_leave():
    def read(data: bytes) -> None:
        rewards.parse_json(data)
        rewards.parse_text(data)
        harbor.read_ctrf(data)
        test_record.read_record(data)

    entities = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]><testsuites><testcase name="&b;"/></testsuites>'
    seeds = [
        b'{"reward": 1.0, "speed": 1e5, "deep": [[1]], "large": 99999999999999999999999}',
        b"0.5\n",
        b'{"results": {"tests": [{"name": "a", "status": "passed"}]}}',
        b'<?xml version="1.0" encoding="utf-8"?><testsuites><testcase classname="a" name="b"><failure/></testcase></testsuites>',
        entities.encode("utf-16"),
    ]
    fuzzed(read, seeds)


@pytest.mark.parametrize("name", sorted(agents.names()))
def test_what_agents_print(name):
    agent = agents.get(name)

    def read(data: bytes) -> None:
        parser = EventParser(agent, max_line=500)
        for start in range(0, len(data), 70):
            parser.feed(data[start : start + 70])
        parser.close()

    lines = [
        {"type": "assistant", "message": {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}},
        {"type": "item.completed", "item": {"type": "command_execution", "command": "ls", "exit_code": 0}},
        {"type": "tool_use", "tool": "bash", "part": {"state": {"input": {"command": "ls"}, "output": "x"}}},
        {"type": "result", "subtype": "success", "total_cost_usd": 0.1, "usage": {"input_tokens": 1}},
    ]
    fuzzed(read, ["\n".join(json.dumps(line) for line in lines).encode(), b"plain words\n\x1b[31mred\n"], seconds=2)


# -- what authors and other owners send


def test_rows_of_tasks(tmp_path):
    row = {"id": "a", "instruction": "x", "files": {"/x": "y"}, "verify": ["true"], "limits": {"agent_s": 3}, "env": {}}
    more = {
        "instruction": "x",
        "verifier": {"kind": "commands", "options": {"commands": ["a"]}},
        "steps": [],
        "image": "host",
    }
    path = tmp_path / "rows.jsonl"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        list(from_jsonl(path))

    fuzzed(read, [json.dumps(row).encode(), json.dumps(more).encode()], Error)


def test_files_of_fleet_tasks(tmp_path):
    path = tmp_path / "tasks.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        list(from_fleet(path))

    one = {"key": "t", "env_id": "shop:v1", "prompt": "do", "verifier_func": "def v(env): return 1", "data_id": "d:1"}
    fuzzed(read, [json.dumps({"tasks": [one]}).encode(), json.dumps(one).encode()], Error)


def test_requests_for_rollouts():
    server = ServiceDefaults(agent="nop", sandbox="local")
    asked = {"tasks": [{"instruction": "x", "verify": "true"}], "attempts": 2, "options": {"limits": {"agent_s": 5}}}
    fuzzed(lambda data: tasks_of(read_request(data), server), [json.dumps(asked).encode()], Error, *BAD_JSON)


def test_compose_files(tmp_path):
    (tmp_path / "instruction.md").write_text("do it")
    (tmp_path / "task.toml").write_text('version = "1.0"\n')
    (tmp_path / "environment").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text("true\n")

    def read(data: bytes) -> None:
        compose = tmp_path / "environment" / "docker-compose.yaml"
        compose.write_bytes(data)
        load_folder(tmp_path)
        read_services(str(compose))

    seeds = [
        b"services:\n  main:\n    image: host\n    environment:\n      - A=b\n      - C\n    working_dir: /app\n",
        b"services:\n  main:\n    build: {context: .}\n    environment: {A: b, N: 1}\n    command: [sleep, infinity]\n",
        b"services:\n  main:\n    depends_on: {db: {condition: service_healthy}}\n  db:\n    image: x\n    cpus: 0.5\n"
        b"    mem_limit: 512m\n    volumes: ['d:/data:ro']\n"
        b"    healthcheck: {test: [CMD, x], interval: 1m30s}\nvolumes: {d: {}}\n",
    ]
    fuzzed(read, seeds, Error)


def test_pushed_bundles(tmp_path):
    count = iter(range(10**9))

    def read(data: bytes) -> None:
        target = tmp_path / "target" / f"{next(count)}"
        unpack(data, target)

    fuzzed(read, [tar_bytes({"a/b": b"x" * 600, "c": b"y"})], Error)
    assert {path.name for path in tmp_path.iterdir()} == {"target"}


def test_bundles_of_verifiers():
    def bundle(method: int) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as archive:
            archive.writestr("verifier.py", "def check(env): return 1\n" * 20)
        return out.getvalue()

    methods = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    fuzzed(unpack_code, [bundle(method) for method in methods], FleetRefusal)


def test_frames_and_cursors_of_callers():
    def read(data: bytes) -> None:
        read_message(data, masked=bool(len(data) % 2))
        try:
            only_message(data)
        except E2bRefusal:
            pass
        read_cursor(data.decode("latin-1"), 2)

    cursor = write_cursor("a", "b").encode()
    fuzzed(read, [message({"process": {"cmd": "x"}}), cursor, base64.b64encode(b"[1]"), b"\x81\x05hello"], PlaneInvalid)
