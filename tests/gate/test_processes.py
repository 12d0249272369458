"""`rollyard serve gate --processes 2`: two real processes on one port that answer as one gate."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rollyard.gate.keys import rollout_place
from rollyard.store import Store
from tests.gate.conftest import Answer, chat, request
from tests.gate.test_durability import Model

pytestmark = pytest.mark.anyio
ROLLYARD = str(Path(sys.executable).with_name("rollyard"))


def name_of(process: int, prefix: str) -> str:
    """A session's id that belongs to the first process, or to the second."""
    return next(name for n in range(100) if rollout_place(name := f"{prefix}-{n}") % 2 == process)


class Served:
    """A gate, its supervisor's process, and the two keys of its operators."""

    def __init__(self, place: Path, *options: str, processes: int = 2) -> None:
        command = [
            ROLLYARD,
            "serve",
            "gate",
            "--json",
            "--processes",
            str(processes),
            "--store",
            str(place / "calls.db"),
        ]
        env = {**os.environ, "XDG_STATE_HOME": str(place)}
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, env=env)
        ready = json.loads(self.process.stdout.readline())
        self.port = int(ready["url"].rpartition(":")[2])
        self.admin, self.trainer = (
            Path(ready[f"{role}_key_file"]).read_text().strip() for role in ("admin", "trainer")
        )

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
    def pids(self) -> dict[int, int]:
        """Of the processes that there are now, by their numbers."""
        return {int(number): pid for number, pid in sorted(self._named("rollyard-gate").items())}

    @property
    def writer(self) -> int | None:
        """The one that writes to the store for all, where there is one now."""
        return self._named("rollyard").get("writer")

    def _named(self, prefix: str) -> dict[str, int]:
        main, found = self.process.pid, {}
        for pid in Path(f"/proc/{main}/task/{main}/children").read_text().split():
            with suppress(OSError):  # it is gone already
                name, _, rest = Path(f"/proc/{pid}/comm").read_text().strip().rpartition("-")
                if name == prefix:
                    found[rest] = int(pid)
        return found

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
        return self

    async def __aexit__(self, *_) -> None:
        self.writer.close()

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._served.port)

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


@asynccontextmanager
async def stopped(pid: int):
    """A process that neither accepts nor reads, from the moment this is entered."""
    os.kill(pid, signal.SIGSTOP)
    try:

        async def stands() -> bool:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

        await until(stands)
        yield
    finally:
        with suppress(ProcessLookupError):  # killed meanwhile
            os.kill(pid, signal.SIGCONT)


async def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_connection_moves_to_the_process_of_each_request(served):
    """With the other process stopped, the first one accepts it for certain."""
    names = [name_of(process, "moves") for process in (0, 1)]
    mine, other = [await served.open(name) for name in names]
    async with Kept(served) as kept:
        async with stopped(served.pids[1]):
            await kept.connect()
            assert (await kept.ask("GET", "/health")).status == 200
            assert said(await kept.ask("POST", "/v1/chat/completions", mine["api_key"], chat("one"))) == "hello"
        long = chat("two" * 400_000)  # larger than what one message between processes holds
        assert said(await kept.ask("POST", "/v1/chat/completions", other["api_key"], long)) == "hello"
        assert said(await kept.ask("POST", "/v1/chat/completions", mine["api_key"], chat("three"))) == "hello"
        streamed = request(
            "POST",
            "/v1/chat/completions",
            key=other["api_key"],
            body=chat("four", stream=True),
            headers={"connection": None},
        )
        for start in range(0, len(streamed), 40):  # in pieces, so that the headers come in several reads
            kept.writer.write(streamed[start : start + 40])
            await kept.writer.drain()
        assert b"data: [DONE]" in await asyncio.wait_for(kept.reader.readuntil(b"[DONE]"), 60)
    for rollout_id in names:
        shown = (await served.ask("GET", f"/sessions/{rollout_id}", served.admin)).json
        assert shown["turns"] == 2, shown


async def test_a_chunked_body_and_an_expected_continue_move_too(served):
    key = (await served.open(name_of(1, "chunks")))["api_key"]
    body = json.dumps(chat("chunks")).encode()
    async with Kept(served) as kept:
        async with stopped(served.pids[1]):
            await kept.connect()
            assert (await kept.ask("GET", "/health")).status == 200
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
    first, second = [(await served.open(name_of(process, "pair")))["api_key"] for process in (0, 1)]
    body = chat("pipelined")
    async with Kept(served) as kept:
        await kept.connect()
        both = [
            request("POST", "/v1/chat/completions", key=k, body=body, headers={"connection": None})
            for k in (first, second)
        ]
        kept.writer.write(b"".join(both))
        assert said(await kept.read()) == "hello"
        behind = await kept.read()
    assert behind.status == 421 and "a connection of its own" in behind.json["error"]["message"]


@pytest.mark.adversarial
async def test_a_refused_request_is_not_kept_while_the_rest_of_it_comes(served):
    """Neither its key nor its length were looked at yet: anybody can send this."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nhost: b\r\ncontent-length: 100000000000\r\n\r\n"
    sent, block, before = 0, b"x" * 2**18, most_memory(served)
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(head)
    with suppress(OSError):
        # The gate reads on for a few seconds, so that its refusal arrives, and then cuts the connection
        while sent < 2**28:
            writer.write(block)
            await writer.drain()
            sent += len(block)
    writer.close()
    assert most_memory(served) - before < sent / 4 + 2**24


def most_memory(served: Served) -> int:
    """Bytes that its processes have held at most, together."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in served.pids.values()]
    return sum(int(text.partition("VmHWM:")[2].split()[0]) * 1024 for text in texts)


def metric(text: bytes, name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.decode().splitlines() if line.startswith(f"{name} "))


async def test_sessions_are_opened_listed_shown_and_closed_as_those_of_one_gate(served):
    opened = [(await served.open())["session_id"] for _ in range(8)] + [
        (await served.open(f"named-{n}"))["session_id"] for n in range(8)
    ]
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
        for path in ("/sessions", *(f"/sessions/{name_of(process, 'x')}" for process in (0, 1)), "/metrics"):
            assert (await served.ask("GET", path, key)).status == 401
    for key in (agent, served.admin, "nothing-at-all"):
        for method, path in (("GET", "/policy_version"), ("POST", "/pause"), ("POST", "/resume")):
            assert (await served.ask(method, path, key)).status == 401
    assert (await served.ask("GET", "/trainer_state", served.trainer)).status == 401


async def test_what_a_trainer_sets_holds_in_every_process_and_in_one_started_again(served):
    names = [name_of(process, "version") for process in (0, 1)]
    keys = [(await served.open(name))["api_key"] for name in names]
    assert (await served.ask("POST", "/policy_version", served.trainer, {"version": 12})).json == {"policy_version": 12}
    assert (await served.ask("POST", "/policy_version", served.trainer, {"version": "x"})).status == 400
    assert (await served.ask("POST", "/pause?wait=5", served.trainer)).json == {"paused": True, "in_flight": 0}
    for pid in served.pids.values():  # one after the other: each learns it from the other one
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
        for name in names:
            (record,), _ = await store.load_calls(name)
            assert record.version_start == 12


async def _replaced(served: Served, before: dict[int, int]) -> bool:
    now = served.pids
    return len(now) == len(before) and now != before


async def _rewritten(served: Served, before: int) -> bool:
    return served.writer not in (None, before)


async def test_a_session_outlives_its_process_and_its_calls_wait_for_the_next_one(served):
    name = name_of(0, "outlives")
    key = (await served.open(name))["api_key"]
    assert said(await served.call(key, "before")) == "hello"
    before = served.pids
    owner = before[0]
    async with stopped(owner):  # so the other one accepts the call, and sends it to one that never reads it
        waiting = asyncio.ensure_future(served.call(key, "meanwhile"))
        other = (await served.open(name_of(1, "outlives")))["api_key"]
        for n in range(5):
            assert said(await served.call(other, f"{n}")) == "hello"
        os.kill(owner, signal.SIGKILL)
    await until(lambda: _replaced(served, before))
    assert said(await waiting) == "hello"
    shown = (await served.ask("GET", f"/sessions/{name}/rollout", served.admin)).json
    assert shown["stats"]["n_turns"] == 2


async def test_calls_wait_for_the_next_writer_and_sessions_go_on(served):
    names = [name_of(process, "written") for process in (0, 1)]
    keys = [(await served.open(name))["api_key"] for name in names]
    writer = served.writer
    assert writer is not None
    async with stopped(writer):
        calls = [asyncio.ensure_future(served.call(key, "meanwhile")) for key in keys]
        done, _ = await asyncio.wait(calls, timeout=0.5)
        assert not done, "an answer is out before its call is kept"
        os.kill(writer, signal.SIGKILL)
    assert [said(await call) for call in calls] == ["hello", "hello"]
    assert served.writer not in (None, writer)
    for name, key in zip(names, keys, strict=True):
        assert said(await served.call(key, "after")) == "hello"
        shown = (await served.ask("GET", f"/sessions/{name}/rollout", served.admin)).json
        assert shown["stats"]["n_turns"] == 2


async def test_the_unix_socket_leads_to_all(served):
    path = str(served.place / "gate.sock")
    assert Path(path).stat().st_mode & 0o777 == 0o600
    for name in ("unix-0", "unix-1", "unix-2", "unix-3"):
        key = (await served.open(name))["api_key"]
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(request("POST", "/v1/chat/completions", key=key, body=chat("by path")))
        assert said(Answer(await asyncio.wait_for(reader.read(), 60))) == "hello"
        writer.close()


async def test_no_answered_call_is_lost_when_processes_are_killed_under_load(tmp_path):
    """Those that answer, and the one that writes."""
    told: dict[str, dict[str, str]] = {}
    over = asyncio.Event()
    async with Model() as model:
        with Served(tmp_path, "--upstream", model.url) as served:
            names = [name_of(process, f"load{n}") for n in range(2) for process in (0, 1)]
            keys = {name: (await served.open(name))["api_key"] for name in names}
            agents = [asyncio.ensure_future(agent(served, keys[n], told.setdefault(n, {}), over)) for n in names]
            for process in (0, "writer", 1, "writer", 0, 1, "writer"):
                before, pids = {name: len(one) for name, one in told.items()}, served.pids

                async def all_went_on(before=before) -> bool:
                    assert not any(one.done() for one in agents), [one.exception() for one in agents if one.done()]
                    return all(len(told[name]) >= before[name] + 5 for name in names)

                await until(all_went_on)
                if process == "writer":
                    writer = served.writer
                    os.kill(writer, signal.SIGKILL)
                    await until(lambda writer=writer: _rewritten(served, writer))
                else:
                    os.kill(pids[process], signal.SIGKILL)
                    await until(lambda pids=pids: _replaced(served, pids))
            over.set()
            await asyncio.gather(*agents)
    async with Store.open(tmp_path / "calls.db") as store:
        for name in names:
            trajectory = await store.trajectory(name)
            answered = [record for record in trajectory.records if record.leaf is not None]
            kept = {trajectory.messages(r.id)[-1].text: trajectory.answer(r.id).message.text for r in answered}
            assert len(kept) == len(answered), "one call has one answer, however often it was sent"
            assert {text: kept.get(text) for text in told[name]} == told[name]


async def agent(served: Served, key: str, told: dict[str, str], over: asyncio.Event) -> None:
    """Asks one new thing after another; what was not answered is asked again until it is."""
    while not over.is_set():
        text = f"turn {len(told)}"
        try:
            told[text] = said(await served.call(key, text))
        except OSError:
            await asyncio.sleep(0.01)


async def test_sessions_go_on_with_another_number_of_processes(tmp_path):
    async with Model() as model:
        with Served(tmp_path, "--upstream", model.url) as served:
            keys = {f"kept-{n}": (await served.open(f"kept-{n}"))["api_key"] for n in range(8)}
            for key in keys.values():
                assert (await served.call(key, "one")).status == 200
        for processes in (1, 3):
            with Served(tmp_path, "--upstream", model.url, processes=processes) as served:
                listed = (await served.ask("GET", "/sessions", served.admin)).json["sessions"]
                assert {one["session_id"] for one in listed} == set(keys)
                for key in keys.values():
                    assert (await served.call(key, f"with {processes}")).status == 200


async def test_the_processes_end_with_their_supervisor(tmp_path):
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)):
        served = Served(tmp_path, "--mode", "black_box", "--upstream", "http://127.0.0.1:9/v1")
        pids = [*served.pids.values(), served.writer]
        assert len(pids) == 3 and None not in pids and served.stop(number) == code

        async def all_gone(pids=pids) -> bool:
            return not any(Path(f"/proc/{pid}/cmdline").exists() and running(pid) for pid in pids)

        await until(all_gone)


def running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


async def refused(*options: str) -> tuple[int, str]:
    command = [ROLLYARD, "serve", "gate", "--processes", "2", *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert out == b""
    return process.returncode, err.decode()


async def test_what_several_processes_cannot_do_is_refused_by_name(tmp_path):
    upstream, store = ("--upstream", "http://127.0.0.1:9/v1"), ("--store", str(tmp_path / "calls.db"))
    for options, words in (
        (upstream, "needs --store"),
        ((*upstream, *store, "--tls-cert", "c.pem", "--tls-key", "k.pem"), "end TLS in a proxy in front"),
        ((*store, "--mode", "interception_gate"), "holds no calls for a trainer"),
        ((*store, "--policy", "queue"), "holds no calls for a trainer"),
    ):
        code, said = await refused(*options)
        assert code == 2 and "--processes 2" in said and words in said
    assert not (tmp_path / "calls.db").exists()


async def test_what_is_wrong_at_the_start_is_said_once(tmp_path):
    code, words = await refused("--upstream", "http://127.0.0.1:9/v1", "--store", str(tmp_path))
    assert code == 3 and words.count(f"{tmp_path} is a directory, not a store") == 1 and "Traceback" not in words


def test_a_connection_waits_where_this_process_has_no_descriptors_left():
    script = """
import resource, socket
from rollyard.net.movable_connection import receive_connections, send_connection
outbox, inbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
inbox.setblocking(False)
most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (inbox.fileno() + 1, most[1]))
print(send_connection(outbox, b"client", outbox.fileno(), b"GET"), list(receive_connections(inbox)))
resource.setrlimit(resource.RLIMIT_NOFILE, most)
print(send_connection(outbox, b"client", outbox.fileno(), b"GET"), [one.first for one in receive_connections(inbox)])
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60)
    assert done.stdout.decode().split("\n")[:2] == ["False []", "True [b'GET']"]


def test_a_process_without_descriptors_says_that_the_other_cannot_be_asked_now():
    script = """
import asyncio, resource, socket
from rollyard.gate.processes import GateProcess, SiblingSilent
outbox, inbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
process = GateProcess(0, listener=inbox, unix_listener=None, inbox=inbox, outboxes=(outbox,), again=False)
async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (inbox.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        await process.ask(0, b"GET / HTTP/1.1")
    except SiblingSilent as error:
        print(error.status)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60)
    assert done.stdout.decode() == "503\n"
