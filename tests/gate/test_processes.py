"""`rollyard serve gate --processes 2`: two real processes on one port that answer as one gate."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollyard.gate.metrics import add_metrics
from rollyard.store import Store
from tests.gate.conftest import Answer, chat, request
from tests.gate.test_durability import Model

pytestmark = pytest.mark.anyio
ROLLYARD = str(Path(sys.executable).with_name("rollyard"))
FIRST, SECOND = "r1", "r0"  # sessions of the first and of the second process


class Served:
    """A gate, its supervisor's process, and the two keys of its operators."""

    def __init__(self, place: Path, *options: str, processes: int = 2) -> None:
        command = [ROLLYARD, "serve", "gate", "--json", "--processes", str(processes), "--store", str(place / "calls.db")]
        env = {**os.environ, "XDG_STATE_HOME": str(place)}
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, env=env)
        ready = json.loads(self.process.stdout.readline())
        self.port = int(ready["url"].rpartition(":")[2])
        self.admin, self.trainer = (Path(ready[f"{role}_key_file"]).read_text().strip() for role in ("admin", "trainer"))

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.process.stdout.close()
        return code

    @property
    def pids(self) -> list[int]:
        """Of the processes, in the order in which they were started."""
        main = self.process.pid
        return [int(pid) for pid in Path(f"/proc/{main}/task/{main}/children").read_text().split()]

    async def ask(self, method: str, path: str, key: str | None, body=b"", **headers) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request(method, path, key=key, body=body, headers=headers))
            answer = Answer(await asyncio.wait_for(reader.read(), 60))
        finally:
            writer.close()
        if answer.status == 0:
            raise ConnectionError("cut")
        return answer

    async def open(self, rollout_id: str | None = None, **fields) -> dict:
        named = {} if rollout_id is None else {"session_id": rollout_id}
        answer = await self.ask("POST", "/sessions", self.admin, {**named, **fields})
        assert answer.status == 200, answer.body
        return answer.json

    async def call(self, key: str, text: str = "hi", **fields) -> Answer:
        return await self.ask("POST", "/v1/chat/completions", key, chat(text, **fields))


class Kept:
    """One connection that is kept; an answer is read by its length."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def __aenter__(self) -> Kept:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._served.port)
        return self

    async def __aexit__(self, *_) -> None:
        self.writer.close()

    async def ask(self, method: str, path: str, key: str | None = None, body=b"", **headers) -> Answer:
        self.writer.write(request(method, path, key=key, body=body, headers={"connection": None, **headers}))
        return await self.read()

    async def read(self) -> Answer:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)
        answer = Answer(head)
        answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
        return answer


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    script = place / "script.yaml"
    script.write_text("- text: hello\n")
    with Served(place, "--policy", f"scripted:{script}", "--unix", str(place / "gate.sock")) as one:
        one.place = place
        yield one


def said(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"]


async def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_connection_moves_to_the_process_of_each_request(served):
    """With the other process stopped, the first one accepts it for certain."""
    mine, other = await served.open(FIRST), await served.open(SECOND)
    second = served.pids[1]
    async with Kept(served) as kept:
        os.kill(second, signal.SIGSTOP)
        try:
            assert (await kept.ask("GET", "/health")).status == 200
            assert said(await kept.ask("POST", "/v1/chat/completions", mine["api_key"], chat("one"))) == "hello"
        finally:
            os.kill(second, signal.SIGCONT)
        long = chat("two" * 400_000)  # larger than what one message between processes holds
        assert said(await kept.ask("POST", "/v1/chat/completions", other["api_key"], long)) == "hello"
        assert said(await kept.ask("POST", "/v1/chat/completions", mine["api_key"], chat("three"))) == "hello"
        streamed = request(
            "POST", "/v1/chat/completions", key=other["api_key"], body=chat("four", stream=True), headers={"connection": None}
        )
        for start in range(0, len(streamed), 40):  # in pieces, so that the headers come in several reads
            kept.writer.write(streamed[start : start + 40])
            await kept.writer.drain()
        assert b"data: [DONE]" in await asyncio.wait_for(kept.reader.readuntil(b"[DONE]"), 60)
    for rollout_id in (FIRST, SECOND):
        shown = (await served.ask("GET", f"/sessions/{rollout_id}", served.admin)).json
        assert shown["turns"] == 2, shown


async def test_a_chunked_body_and_an_expected_continue_move_too(served):
    key = (await served.open("r4"))["api_key"]  # of the second process
    body = json.dumps(chat("chunks")).encode()
    async with Kept(served) as kept:
        os.kill(served.pids[1], signal.SIGSTOP)
        try:
            assert (await kept.ask("GET", "/health")).status == 200
        finally:
            os.kill(served.pids[1], signal.SIGCONT)
        options = {"transfer-encoding": "chunked", "content-length": None, "expect": "100-continue", "connection": None}
        kept.writer.write(request("POST", "/v1/chat/completions", key=key, headers=options))
        assert b" 100 " in await asyncio.wait_for(kept.reader.readuntil(b"\r\n\r\n"), 60)
        kept.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert said(await kept.read()) == "hello"


async def test_a_number_in_a_key_opens_nothing(served):
    key = (await served.open("forged"))["api_key"]
    refused_before = metric((await served.ask("GET", "/metrics", served.admin)).body, "rollyard_gate_bad_keys_total")
    others = [f"{key[:-2]}{number:02x}" for number in range(256) if f"{number:02x}" != key[-2:]][:8]
    for forged in (*others, key[:-2], key[:-2] + "zz", "ff", "0"):
        assert (await served.call(forged)).status == 401, forged
    refused = metric((await served.ask("GET", "/metrics", served.admin)).body, "rollyard_gate_bad_keys_total")
    assert refused - refused_before == 12, "each is counted, by whichever process refused it"


async def test_requests_in_one_read_are_answered_or_told_to_come_alone(served):
    first, second = (await served.open("r3"))["api_key"], (await served.open("pair-0"))["api_key"]
    assert {int(key[-2:], 16) % 2 for key in (first, second)} == {0, 1}
    body = chat("pipelined")
    async with Kept(served) as kept:
        both = [request("POST", "/v1/chat/completions", key=k, body=body, headers={"connection": None}) for k in (first, second)]
        kept.writer.write(b"".join(both))
        assert said(await kept.read()) == "hello"
        behind = await kept.read()
    assert behind.status == 421 and "a connection of its own" in behind.json["error"]["message"]


def metric(text: bytes, name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.decode().splitlines() if line.startswith(f"{name} "))


async def test_sessions_are_opened_listed_shown_and_closed_as_those_of_one_gate(served):
    opened = [(await served.open())["session_id"] for _ in range(8)] + [(await served.open(f"named-{n}"))["session_id"] for n in range(8)]
    listed = (await served.ask("GET", "/sessions", served.admin)).json["sessions"]
    ids = [one["session_id"] for one in listed]
    assert set(opened) <= set(ids) and len(ids) == len(set(ids))
    assert [one["created_at"] for one in listed] == sorted(one["created_at"] for one in listed)
    for rollout_id in opened:
        again = await served.ask("POST", "/sessions", served.admin, {"session_id": rollout_id})
        assert again.status == 400 and "has a session already" in again.json["error"]
        for what in ("", "/rollout"):
            shown = await served.ask("GET", f"/sessions/{rollout_id}{what}", served.admin)
            assert shown.status == 200 and shown.json["session_id"] == rollout_id
        assert (await served.ask("GET", f"/sessions/{rollout_id}/trace_entries", served.admin)).status == 409
        supplied = await served.ask("PATCH", f"/sessions/{rollout_id}", served.admin, {"api_key": "k"})
        assert supplied.status == 409 and "lacks no api_key" in supplied.json["error"]
    assert metric((await served.ask("GET", "/metrics", served.admin)).body, "rollyard_gate_sessions") == len(ids)
    for rollout_id in opened:
        assert (await served.ask("DELETE", f"/sessions/{rollout_id}", served.admin)).json == {"deleted": True}
    left = (await served.ask("GET", "/sessions", served.admin)).json["sessions"]
    assert {one["session_id"] for one in left} == set(ids) - set(opened)
    for path in ("/sessions/none", "/sessions/nobody/rollout"):
        assert (await served.ask("GET", path, served.admin)).status == 404
    wrong = await served.ask("POST", "/sessions", served.admin, {"colour": "red"})
    assert wrong.status == 400 and "colour" in wrong.json["error"]


async def test_no_key_opens_more_than_in_one_process(served):
    agent = (await served.open("agent-alone"))["api_key"]
    for key in (agent, served.trainer, "nothing-at-all"):
        for path in ("/sessions", "/sessions/r1", "/sessions/r0", "/metrics"):
            assert (await served.ask("GET", path, key)).status == 401
    for key in (agent, served.admin, "nothing-at-all"):
        for method, path in (("GET", "/policy_version"), ("POST", "/pause"), ("POST", "/resume")):
            assert (await served.ask(method, path, key)).status == 401
    assert (await served.ask("GET", "/trainer_state", served.trainer)).status == 401


async def test_what_a_trainer_sets_holds_in_every_process_and_in_one_started_again(served):
    keys = [(await served.open(name))["api_key"] for name in ("version-1", "version-0")]
    assert {int(key[-2:], 16) % 2 for key in keys} == {0, 1}
    assert (await served.ask("POST", "/policy_version", served.trainer, {"version": 12})).json == {"policy_version": 12}
    assert (await served.ask("POST", "/policy_version", served.trainer, {"version": "x"})).status == 400
    assert (await served.ask("POST", "/pause?wait=5", served.trainer)).json == {"paused": True, "in_flight": 0}
    for pid in served.pids:  # one after the other: each learns it from the other one
        before = served.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda before=before: _replaced(served, before))
        assert (await served.ask("GET", "/sessions", served.admin)).status == 200, "both answer again"
    calls = [asyncio.ensure_future(served.call(key, "while paused")) for key in keys]

    async def both_wait() -> bool:
        return metric((await served.ask("GET", "/metrics", served.admin)).body, "rollyard_gate_waiting") == 2

    await until(both_wait)
    assert (await served.ask("GET", "/policy_version", served.trainer)).json == {"policy_version": 12}
    assert (await served.ask("POST", "/resume", served.trainer)).json == {"paused": False}
    assert [said(await call) for call in calls] == ["hello", "hello"]
    async with Store.open(served.place / "calls.db") as store:
        for name in ("version-1", "version-0"):
            (record,), _ = await store.load_calls(name)
            assert record.version_start == 12


async def _replaced(served: Served, before: list[int]) -> bool:
    now = served.pids
    return len(now) == len(before) and now != before


async def test_a_session_outlives_its_process_and_its_calls_wait_for_the_next_one(served):
    key = (await served.open("outlives-1"))["api_key"]
    owner = served.pids[int(key[-2:], 16) % 2]
    assert said(await served.call(key, "before")) == "hello"
    before = served.pids
    os.kill(owner, signal.SIGSTOP)
    waiting = asyncio.ensure_future(served.call(key, "meanwhile"))  # accepted by the other, and sent to one that is stopped
    other = (await served.open("outlives-2"))["api_key"]
    assert int(other[-2:], 16) % 2 != int(key[-2:], 16) % 2
    for n in range(5):
        assert said(await served.call(other, f"{n}")) == "hello"
    os.kill(owner, signal.SIGKILL)
    await until(lambda: _replaced(served, before))
    try:
        assert said(await waiting) == "hello"
    except ConnectionError:  # it had been accepted by the one that was killed
        pass
    assert said(await served.call(key, "meanwhile")) == "hello"
    shown = (await served.ask("GET", "/sessions/outlives-1/rollout", served.admin)).json
    assert shown["stats"]["n_turns"] == 2, "the call that was sent twice is one"


async def test_the_unix_socket_leads_to_all(served):
    path = str(served.place / "gate.sock")
    assert Path(path).stat().st_mode & 0o777 == 0o600
    for name in ("unix-0", "unix-1", "unix-2", "unix-3"):
        key = (await served.open(name))["api_key"]
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(request("POST", "/v1/chat/completions", key=key, body=chat("by path")))
        assert said(Answer(await asyncio.wait_for(reader.read(), 60))) == "hello"
        writer.close()
