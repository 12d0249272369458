"""SIGKILL at any moment: what an agent was told is in the log, and asking again gives the same answer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from rollyard.store import Store
from tests.gate.conftest import Answer, request

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
KILLS = 50
AGENTS = 4


class Model:
    """A model server that says something new each time, so that a lost and repeated answer would show."""

    def __init__(self) -> None:
        self.said = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_) -> None:
        self.server.close()

    async def _serve(self, reader, writer) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
                self.said += 1
                message = {"role": "assistant", "content": f"word {self.said}"}
                body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


class Server:
    """`rollyard serve gate` on one database and one port, killed and started again."""

    def __init__(self, model: Model, place: Path) -> None:
        self.place = place
        self.admin = place / "admin-key"
        self.command = [
            str(Path(sys.executable).with_name("rollyard")), "serve", "gate", "--json",
            "--upstream", model.url, "--store", str(place / "calls.db"),
            "--admin-key-file", str(self.admin), "--trainer-key-file", str(place / "trainer-key"),
        ]  # fmt: skip
        self.port = 0

    async def start(self) -> None:
        command = [*self.command, "--port", str(self.port)]
        self.process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        ready = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))
        self.port = int(ready["url"].rpartition(":")[2])

    async def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    async def ask(self, method: str, path: str, key: str, body) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request(method, path, key=key, body=body))
            answer = Answer(await asyncio.wait_for(reader.read(), 30))
        finally:
            writer.close()
        if answer.status == 0 or len(answer.body) != int(answer.headers["content-length"]):
            raise ConnectionError("cut")
        return answer


async def agent(server: Server, key: str, number: int, told: dict[str, str], stop: asyncio.Event) -> None:
    """Asks one new thing after another; what was not answered is asked again until it is."""
    turn = 0
    while not stop.is_set():
        text = f"agent {number} turn {turn}"
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        try:
            answer = await server.ask("POST", "/v1/chat/completions", key, body)
        except (OSError, TimeoutError):
            await asyncio.sleep(0.02)
            continue
        assert answer.status == 200, answer.body
        told[text] = answer.json["choices"][0]["message"]["content"]
        turn += 1


async def test_no_answered_call_is_lost_in_fifty_kills(tmp_path):
    chance, told, stop = random.Random(11), {}, asyncio.Event()
    async with Model() as model:
        server = Server(model, tmp_path)
        await server.start()
        opened = await server.ask("POST", "/sessions", server.admin.read_text().strip(), {"session_id": "r1"})
        key = opened.json["api_key"]
        agents = [asyncio.ensure_future(agent(server, key, n, told, stop)) for n in range(AGENTS)]
        for _ in range(KILLS):
            before = len(told)
            while len(told) < before + 5:
                assert not any(a.done() for a in agents), [a.exception() for a in agents if a.done()]
                await asyncio.sleep(0.002)
            await asyncio.sleep(chance.random() * 0.05)
            await server.kill()
            await server.start()
        stop.set()
        await asyncio.gather(*agents)
        await server.kill()
    assert len(told) >= KILLS * 5
    async with Store.open(tmp_path / "calls.db") as store:
        trajectory = await store.trajectory("r1")
    kept = {}
    for record in trajectory.records:
        if record.leaf is not None:
            asked, answered = trajectory.messages(record.id)[-1].text, trajectory.answer(record.id).message.text
            assert asked not in kept, "one call has one answer, however often it was sent"
            kept[asked] = answered
    assert {text: kept.get(text) for text in told} == told
