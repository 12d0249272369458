"""Senders and readers without end, and more connections than a server has descriptors: it goes on for the others."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rollyard.net.app_server import serve_app
from rollyard.net.binding import listen
from rollyard.net.http_server import HttpLimits

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]
LIMITS = HttpLimits(headers_s=0.3, body_s=0.3, write_s=0.3)
ROOT = Path(__file__).parents[2]
PATIENT = HttpLimits(headers_s=1e6, body_s=1e6)
DESCRIPTORS = 128
FINISHED: list[str] = []


async def answer(scope, receive, send):
    if scope["path"] == "/body":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2000 if scope["path"] == "/large" else 1):
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
    FINISHED.append(scope["path"])


@contextlib.asynccontextmanager
async def served(limits=LIMITS):
    with listen("127.0.0.1", 0) as sock:
        task = asyncio.create_task(serve_app(answer, sock, limits=limits))
        try:
            yield sock.getsockname()[1]
        finally:
            task.cancel()
            await asyncio.wait([task])


async def ends(reader):
    """What came until the server hung up."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 30)
    return b""


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nhost: x\r\n",
        b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\nabc",
        b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
async def test_a_request_that_does_not_arrive_is_cut_off(start):
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        await ends(reader)
        writer.close()


async def test_a_body_that_comes_steadily_is_not_cut_off():
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 20000\r\n\r\n")
        for _ in range(20):
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.05)
        assert (await ends(reader)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_body_that_comes_in_large_pieces_is_no_header():
    async with served(PATIENT) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /body HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 3000000\r\n\r\n" + b"x" * 3_000_000
        )
        assert (await ends(reader)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_answer_that_nobody_reads_is_given_up():
    FINISHED.clear()
    async with served() as port:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(30):
                while "/large" not in FINISHED:
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "head", [b"x-a: " + b"a" * 300_000, b"x-a: b\r\n" * 1000, b"\r\n3\r\nabc\r\n0\r\n" + b"x: " + b"a" * 300_000]
)
async def test_headers_and_trailers_without_end_are_refused(head):
    async with served(PATIENT) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n" + head)
        assert b"200 OK" not in await ends(reader)
        writer.close()


COMMANDS = {
    "page": ["view", "STORE", "--write", "--port", "0", "--json"],
    "gate": ["serve", "gate", "--port", "0", "--json", "--policy", "scripted:SCRIPT"],
    "environment": ["serve", "env", "examples/envs/echo.py:EchoEnv", "--port", "0", "--json"],
}


@pytest.mark.slow
@pytest.mark.parametrize("server", list(COMMANDS))
async def test_connections_beyond_the_descriptors_stop_no_server(server, tmp_path):
    script, store = tmp_path / "script.json", tmp_path / "runs.db"
    script.write_text("[]")
    words = [word.replace("STORE", str(store)).replace("SCRIPT", str(script)) for word in COMMANDS[server]]
    limit = ["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}"]
    said = (tmp_path / "stderr").open("wb+")
    command = [*limit, sys.executable, "-m", "rollyard", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=said)
    opened = []
    try:
        url = json.loads(process.stdout.readline())["url"]
        address = urlsplit(url)
        for _ in range(3 * DESCRIPTORS):
            sock = socket.create_connection((address.hostname, address.port))
            sock.sendall(b"GET / HTTP/1.1\r\n")
            opened.append(sock)
        async with asyncio.timeout(60):  # the half-open ones are still open on this side
            while not await asyncio.to_thread(answers, url):
                await asyncio.sleep(0.1)
        said.seek(0)
        # a round of the event loop once tried each place of a queue of 2,048 in turn, and told of each
        assert said.read().count(b"Too many open files") < 2048
    finally:
        said.close()
        for sock in opened:
            sock.close()
        process.terminate()
        process.wait(30)


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
