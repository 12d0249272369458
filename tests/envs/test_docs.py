"""docs/environments.md: every command it prints is run, and the program beside it too."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from rollyard.envs.telemetry import LINES

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


async def healthy(url, program):
    async with aiohttp.ClientSession() as http, asyncio.timeout(120):
        while program.returncode is None:
            try:
                return await (await http.get(f"{url}/health")).json()
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)
    raise AssertionError("the server ended")


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.ordinary("*--keep sessions/")
async def test_a_printed_command_serves(line, tmp_path):
    port = free_port()
    words = shlex.split(line.replace("8000", str(port)))
    assert words[:3] == ["rollyard", "serve", "env"]
    words = [str(ROOT / w) if w.startswith("examples/") else w for w in words]
    words = [w.replace("scripted:", f"scripted:{ROOT}/") for w in words]
    tool = str(Path(sys.executable).with_name("rollyard"))
    program = await asyncio.create_subprocess_exec(tool, *words[1:], cwd=tmp_path, stdout=asyncio.subprocess.DEVNULL)
    try:
        assert (await healthy(f"http://127.0.0.1:{port}", program))["status"] == "healthy"
        if line == COMMANDS[0]:
            out = await ran(blocks("python")[1].replace("8000", str(port)), tmp_path)
            assert out == "{'message': 'hello'} 5.0\na tool of the environment\n"
    finally:
        program.terminate()
        await program.wait()


async def ran(code, cwd):
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), cwd=cwd, stdout=asyncio.subprocess.PIPE, env=os.environ
    )
    out, _ = await asyncio.wait_for(program.communicate(), 120)
    assert program.returncode == 0
    return out.decode()


async def test_the_printed_class_is_an_environment(tmp_path):
    (tmp_path / "own.py").write_text(blocks("python")[0])
    tool = str(Path(sys.executable).with_name("rollyard"))
    port = free_port()
    program = await asyncio.create_subprocess_exec(
        *(tool, "serve", "env", "own.py:EchoEnv", "--port", str(port)), cwd=tmp_path, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        assert (await healthy(f"http://127.0.0.1:{port}", program))["status"] == "healthy"
    finally:
        program.terminate()
        await program.wait()


def test_the_page_names_the_words_that_servers_say():
    last = PAGE.rpartition("## Logs and traces")[2]
    for word in LINES:
        if word.startswith("env.session."):
            assert f".{word.rpartition('.')[2]}`" in last, word
