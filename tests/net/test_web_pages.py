"""A web page in the operator's browser reaches no server of ours: each is started as people start it, without a key where it
needs none, and asked the way browsers ask for a page of another origin."""

import asyncio
import base64
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from rollyard.net.web_pages import AllowedHosts, page_reason

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]
ENV = """
import rollyard as ry

class Echo(ry.Env):
    async def reset(self, **_):
        return ry.StepResult(observation={})
    async def step(self, action):
        return ry.StepResult(observation=dict(action))
"""
FOREIGN = {"Origin": "https://evil.example"}
PAGES = [
    FOREIGN,
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Host": "rebound.evil.example"},
    {"Host": "127.0.0.1.evil.example", "Origin": "http://127.0.0.1.evil.example"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@asynccontextmanager
async def served(*words, env=None):
    command = ["-c", "from rollyard.cli.main import main; main()", *words]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **(env or {})}
    )
    try:
        async with asyncio.timeout(120):
            yield json.loads(await process.stdout.readline())["url"].rstrip("/")
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)


async def ask(url, method="GET", headers=None, body=None, kind="application/json"):
    sent = {**({"Content-Type": kind} if body is not None else {}), **(headers or {})}
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=sent, data=body) as reply:
        return reply.status


@pytest.mark.parametrize("hosts", [(), ("env.example",)])
async def test_an_environment_without_a_key_answers_no_web_page(tmp_path, hosts):
    (tmp_path / "echo.py").write_text(ENV)
    more = [word for name in hosts for word in ("--allow-host", name)]
    async with served("serve", "env", f"{tmp_path / 'echo.py'}:Echo", "--json", *more) as url:
        for headers in PAGES:
            assert await ask(f"{url}/sessions", "POST", headers, b"{}") == 403, headers
            assert await ask(f"{url}/health", "GET", headers) == 403, headers
            assert await handshake(url, headers) == 403, headers
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            assert await ask(f"{url}/sessions", "POST", None, b"{}", kind) == 403
        assert await ask(f"{url}/sessions", "POST", None, b"{}") == 200
        assert await ask(f"{url}/health") == 200
        assert await handshake(url, {}) == 101
        assert await handshake(url, {"Origin": url}) == 101
        assert await ask(f"{url}/health", "GET", {"Host": "env.example"}) == (200 if hosts else 403)


async def handshake(url, headers):
    """What a WebSocket's first line says."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key = base64.b64encode(os.urandom(16)).decode()
    lines = {"Host": f"{host}:{port}", "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": key}
    lines = {**lines, "Sec-WebSocket-Version": "13", **headers}
    writer.write(("GET /ws HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n").encode())
    line = await asyncio.wait_for(reader.readline(), 20)
    writer.close()
    return int(line.split()[1])


async def test_a_gate_answers_no_web_page(tmp_path):
    async with served("serve", "gate", "--mode", "interception_gate", "--json") as url:
        for headers in PAGES:
            assert await ask(f"{url}/health", "GET", headers) == 403, headers
            for path in ("/v1/chat/completions", "/sessions", "/pause"):
                assert await ask(url + path, "POST", headers, b"{}", "text/plain") == 401, headers
        assert await ask(f"{url}/health") == 200


async def test_a_browser_server_answers_no_web_page(tmp_path):
    if not any((Path(place) / "chromium").exists() for place in os.environ["PATH"].split(":")):
        pytest.skip("no Chromium is installed (Debian package chromium)")
    async with served("serve", "browser", "--json", "--key-file", str(tmp_path / "key")) as url:
        for headers in PAGES:
            assert await ask(f"{url}/health", "GET", headers) == 403, headers
        assert await ask(f"{url}/leases", "POST", None, b"{}") == 401
        assert await ask(f"{url}/health") == 200


async def test_a_model_server_without_a_key_answers_no_web_page():
    pytest.importorskip("torch", reason="torch (make torch) is not installed")
    async with served("serve", "model", "--json") as url:
        for headers in PAGES:
            assert await ask(f"{url}/pause", "POST", headers, b"{}") == 403, headers
            assert await ask(f"{url}/weight_version", "GET", headers) == 403, headers
        assert await ask(f"{url}/pause", "POST", None, b"{}", "text/plain") == 403
        assert await ask(f"{url}/weight_version") == 200


async def test_the_page_of_runs_answers_no_other_page(tmp_path):
    async with served("view", str(tmp_path / "r.db"), "--write", "--json", "--port", "0") as url:
        for headers in PAGES:
            assert await ask(f"{url}/", "GET", headers) == 403, headers
            assert await ask(f"{url}/start", "POST", headers, b"token=x", "application/x-www-form-urlencoded") == 403
        assert await ask(f"{url}/") == 200


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost:80", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.9.9.9:1", True),
        ("[::1]:80", True),
        ("", False),
        ("localhost.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("evil.example:127", False),
        ("0x7f.1", False),
    ],
)
def test_loopback_is_known_by_its_own_names(host, allowed):
    assert (host.encode() in AllowedHosts("127.0.0.1")) is allowed
    assert host.encode() in AllowedHosts("0.0.0.0")  # noqa: S104 - bound beyond loopback, it is reached by any name
    assert (page_reason("GET", {b"host": host.encode()}, AllowedHosts("::1")) is None) is allowed
