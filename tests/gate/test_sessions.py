"""Sessions: keys, listeners of their own, budgets, closing, and a restart in between."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess

import pytest

from rollyard.core.errors import ConfigError, GateUnreachable, UpstreamError
from rollyard.gate import Budget, Gate, GateLimits, Tls
from tests.gate.conftest import Answers, MemoryLog, ask, chat, open_gate, port_of, request, said
from tests.virtual_time import run_in_virtual_time
from tests.waiting import settle, until

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
COUNT = "/v1/messages/count_tokens"


class Listening:
    """A sandbox's listener with a real socket."""

    def __init__(self) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def accept(self):
        raise AssertionError("a listener with a socket is not asked for streams")

    async def aclose(self) -> None:
        self.sock.close()


class Stream:
    def __init__(self, reader, writer) -> None:
        self.reader, self.writer = reader, writer

    async def receive(self, max_bytes=65536) -> bytes:
        return await self.reader.read(max_bytes)

    async def send(self, data) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_eof(self) -> None:
        self.writer.write_eof()

    async def aclose(self) -> None:
        self.writer.close()


class Streaming:
    """A listener without a socket: it hands out streams."""

    sock = None

    async def open(self):
        self.queue = asyncio.Queue()

        async def connected(reader, writer):
            await self.queue.put(Stream(reader, writer))

        self.server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def accept(self):
        return await self.queue.get()

    async def aclose(self) -> None:
        self.server.close()


async def test_a_listener_bound_to_a_session_takes_no_other_key():
    async with open_gate() as gate:
        mine, other = await gate.open_session("r1"), await gate.open_session("r2")
        listener = Listening()
        await gate.serve(listener, mine)
        assert (await ask(listener, "POST", CHAT, key=mine.key, body=chat())).status == 200
        assert (await ask(listener, "POST", CHAT, key=other.key, body=chat())).status == 401
        await mine.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", listener.port)


async def test_a_listener_that_hands_out_streams_is_served_too():
    async with open_gate() as gate:
        session = await gate.open_session("r1")
        listener = await Streaming().open()
        await gate.serve(listener, session)
        answers = await asyncio.gather(
            *(ask(listener, "POST", CHAT, key=session.key, body=chat(f"{n}")) for n in range(5))
        )
        assert [a.status for a in answers] == [200] * 5
        await session.close()
        await until(lambda: gate.connections == 0)
        await listener.aclose()


async def test_a_hundred_listeners_share_one_server():
    async with open_gate(host=None) as gate:
        sessions = []
        for number in range(100):
            session = await gate.open_session(f"r{number}")
            listener = Listening()
            await gate.serve(listener, session)
            sessions.append((session, listener))
        answers = await asyncio.gather(*(ask(li, "POST", CHAT, key=s.key, body=chat()) for s, li in sessions))
        assert {a.status for a in answers} == {200}
        for session, _ in sessions:
            await session.close()
        assert not gate.sessions
        for _, listener in sessions:
            with pytest.raises(OSError):
                await ask(listener, "GET", "/health")


async def test_a_session_that_was_being_saved_when_its_opener_was_cancelled_is_closed_in_the_log():
    class LateLog(MemoryLog):
        saved = asyncio.Event()

        async def save_session(self, session):
            await super().save_session(session)
            self.saved.set()
            await asyncio.sleep(0.2)

    log = LateLog()
    async with open_gate(log=log) as gate:
        opening = asyncio.create_task(gate.open_session("r1"))
        await log.saved.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not gate.sessions and log.kept["r1"].closed_at is not None


async def test_a_session_that_the_log_refuses_closes_nothing_there():
    class OtherLog(MemoryLog):
        async def save_session(self, session):
            if session.rollout_id in self.kept:
                raise ConfigError("another gate has it")
            await super().save_session(session)

    log = OtherLog()
    async with open_gate(log=log) as one, open_gate(log=log) as other:
        await one.open_session("r1")
        with pytest.raises(ConfigError, match="another gate"):
            await other.open_session("r1")
        assert log.kept["r1"].closed_at is None


async def test_the_path_may_name_the_rollout_and_must_agree_with_the_key():
    async with open_gate() as gate:
        session = await gate.open_session("r1")
        assert (await ask(gate, "POST", f"/r/r1{CHAT}", key=session.key, body=chat())).status == 200
        assert (await ask(gate, "POST", f"/r/r2{CHAT}", key=session.key, body=chat())).status == 404


@pytest.mark.parametrize("form", ["bearer", "x-api-key", "x-goog-api-key", "query"])
async def test_a_key_is_taken_in_every_form_that_agents_use(form):
    async with open_gate() as gate:
        key = (await gate.open_session("r1")).key
        headers = {"authorization": f"Bearer {key}"} if form == "bearer" else {form: key} if form != "query" else {}
        path = f"/v1/models?key={key}" if form == "query" else "/v1/models"
        assert (await ask(gate, "GET", path, headers=headers)).status == 200


async def test_a_unix_socket_serves_the_same(tmp_path):
    path = str(tmp_path / "gate.sock")
    async with open_gate(host=None, unix=path) as gate:
        session = await gate.open_session("r1")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(request("POST", CHAT, key=session.key, body=chat()))
        assert b"hello" in await reader.read()
        writer.close()
        gate.check(session)


async def test_tls_files_make_the_address_https(tmp_path):
    cert, key = tmp_path / "c.pem", tmp_path / "k.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*make, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    async with open_gate(tls=Tls(cert=str(cert), key=str(key))) as gate:
        assert gate.url.startswith("https://")
        session = await gate.open_session("r1")
        trust = ssl.create_default_context(cafile=str(cert))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port_of(gate), ssl=trust, server_hostname="localhost"
        )
        writer.write(request("POST", CHAT, key=session.key, body=chat()))
        assert b"hello" in await reader.read()
        writer.close()


async def test_a_bind_beyond_loopback_is_said_aloud(caplog):
    async with open_gate(host="0.0.0.0"):
        assert "beyond loopback" in caplog.text
    caplog.clear()
    async with open_gate():
        assert caplog.text == ""


async def test_closing_revokes_the_key_and_tells_the_policy(log):
    policy = Answers()
    async with open_gate(policy, log=log) as gate:
        session = await gate.open_session("r1")
        await ask(gate, "POST", CHAT, key=session.key, body=chat())
        trajectory = await session.close()
        assert len(trajectory.records) == 1
        late = await ask(gate, "POST", CHAT, key=session.key, body=chat())
        assert late.status == 409
        assert policy.over == ["r1"]
        assert len(log.records) == 1
        assert log.kept["r1"].closed_at is not None
        assert await session.close() is trajectory


async def test_a_straggler_ends_when_its_rollout_closes(log):
    async def never(call):
        await asyncio.Event().wait()

    policy = Answers(never)
    async with open_gate(policy, log=log) as gate:
        session = await gate.open_session("r1")
        asked = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat()))
        await until(lambda: session.in_flight == 1)
        await session.close()
        assert (await asked).status == 409
        assert policy.cancelled == 1
        assert session.in_flight == 0
        assert [r.leaf for r in log.records] == [None]


async def test_what_is_being_committed_when_a_rollout_closes_is_finished(log):
    committing, go = asyncio.Event(), asyncio.Event()

    async def slowly():
        committing.set()
        await go.wait()

    log.before_commit = slowly
    async with open_gate(log=log) as gate:
        session = await gate.open_session("r1")
        asked = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat()))
        await committing.wait()
        closing = asyncio.ensure_future(session.close())
        await settle()
        assert not closing.done()
        go.set()
        await closing
        assert (await asked).status == 200
        assert len(log.records) == 1


async def test_sessions_keys_and_answers_survive_a_restart(log):
    policy = Answers(lambda call: said(f"answer {len(policy.asked)}"))
    async with open_gate(policy, log=log) as gate:
        session = await gate.open_session("r1", budget=Budget(calls=3))
        gone = await gate.open_session("r2")
        await gone.close()
        key, closed = session.key, gone.key
        await ask(gate, "POST", CHAT, key=key, body=chat("one"))
    assert key not in repr(log.kept)
    async with open_gate(policy, log=log) as gate:
        again = await ask(gate, "POST", CHAT, key=key, body=chat("one"))
        assert again.json["choices"][0]["message"]["content"] == "answer 1", "the same call gets the same answer"
        new = await ask(gate, "POST", CHAT, key=key, body=chat("two"))
        assert new.json["choices"][0]["message"]["content"] == "answer 2"
        assert (await ask(gate, "POST", CHAT, key=closed, body=chat())).status == 409
        assert gate.sessions["r1"].calls == 2
        assert len(gate.sessions["r1"].trajectory.records) == 2
        await ask(gate, "POST", CHAT, key=key, body=chat("three"))
        await ask(gate, "POST", CHAT, key=key, body=chat("four"))
        assert gate.sessions["r1"].exhausted == "calls", "the budget goes on where it was"


async def test_a_delivered_answer_that_was_built_upon_is_not_replayed_after_a_restart(log):
    policy = Answers(lambda call: said(f"answer {len(policy.asked)}"))
    async with open_gate(policy, log=log) as gate:
        session = await gate.open_session("r1")
        await ask(gate, "POST", CHAT, key=session.key, body=chat("one"))
        more = chat("one")
        more["messages"] += [{"role": "assistant", "content": "answer 1"}, {"role": "user", "content": "two"}]
        await ask(gate, "POST", CHAT, key=session.key, body=more)
    async with open_gate(policy, log=log) as gate:
        again = await ask(gate, "POST", CHAT, key=session.key, body=chat("one"))
        assert again.json["choices"][0]["message"]["content"] == "answer 3"


async def test_a_token_count_may_be_the_first_request_after_a_restart(log):
    async with open_gate(log=log) as gate:
        session = await gate.open_session("r1")
        await ask(gate, "POST", CHAT, key=session.key, body=chat("one"))
    async with open_gate(log=log) as gate:
        assert (await ask(gate, "POST", COUNT, key=session.key, body=chat("one"))).json["input_tokens"] > 0
        assert (await ask(gate, "POST", CHAT, key=session.key, body=chat("two"))).status == 200
    assert [(record.seq, record.leaf is None) for record in log.records] == [(0, False), (1, True), (2, False)]


async def test_token_counts_use_up_no_budget_before_and_after_a_restart(log):
    async with open_gate(log=log) as gate:
        session = await gate.open_session("r1", budget=Budget(calls=2))
        for _ in range(3):
            await ask(gate, "POST", COUNT, key=session.key, body=chat("one"))
        await ask(gate, "POST", CHAT, key=session.key, body=chat("one"))
        assert session.calls == 1
    async with open_gate(log=log) as gate:
        await ask(gate, "POST", CHAT, key=session.key, body=chat("two"))
        session = gate.sessions["r1"]
        assert (session.calls, session.answered, session.exhausted) == (2, 2, None)


async def test_what_cannot_be_read_back_or_counted_is_refused_and_leaves_no_reader_waiting(log):
    async with open_gate(log=log) as gate:
        session = await gate.open_session("r1")
    log.load_calls = None
    for path in (COUNT, CHAT):
        async with open_gate(log=log) as gate:
            assert (await ask(gate, "POST", path, key=session.key, body=chat("one"))).status == 500
            assert (await ask(gate, "POST", COUNT, key=session.key, body=chat("one"))).status == 503

    async def count_tokens(call):
        raise UpstreamError("no", status=429)

    policy = Answers()
    policy.count_tokens = count_tokens
    async with open_gate(policy) as gate:
        session = await gate.open_session("r2")
        assert (await ask(gate, "POST", COUNT, key=session.key, body=chat("one"))).status == 429
        assert (await ask(gate, "POST", COUNT, key=session.key, body=b"{")).status == 400


async def test_a_token_count_whose_rollout_ends_is_answered():
    async def count_tokens(call):
        await asyncio.Event().wait()

    policy = Answers()
    policy.count_tokens = count_tokens
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        counting = asyncio.ensure_future(ask(gate, "POST", COUNT, key=session.key, body=chat("one")))
        await settle()
        await session.close()
        assert (await counting).status == 409


async def test_requests_that_are_kept_nowhere_leave_nothing_in_memory():
    async with open_gate() as gate:
        session = await gate.open_session("r1")
        await ask(gate, "POST", CHAT, key=session.key, body=chat("one"))
        for number in range(3):
            bad = chat(f"{number}")
            bad["messages"].append({"role": "nobody"})
            assert (await ask(gate, "POST", CHAT, key=session.key, body=bad)).status == 400
            assert (await ask(gate, "POST", COUNT, key=session.key, body=chat(f"{number}"))).status == 200
            if not number:
                known = len(session.memo)
        assert len(session.memo) == known
        assert not any(b"nobody" in key for key in session.memo)


@pytest.mark.parametrize(
    ("budget", "spent"),
    [
        (Budget(calls=2), "calls"),
        (Budget(prompt_tokens=10), "prompt_tokens"),
        (Budget(completion_tokens=4), "completion_tokens"),
        (Budget(wall_s=0.0), "wall_s"),
    ],
)
async def test_past_its_budget_an_agent_is_asked_in_words_to_stop(budget, spent, log):
    policy = Answers(lambda call: said("hello", sampled=(1, 2, 3), prompt=(4, 5, 6, 7, 8, 9)))
    async with open_gate(policy, log=log) as gate:
        session = await gate.open_session("r1", budget=budget)
        answers = [await ask(gate, "POST", CHAT, key=session.key, body=chat(f"{n}")) for n in range(4)]
        last = answers[-1].json["choices"][0]
        assert "budget" in last["message"]["content"]
        assert last["finish_reason"] == "stop"
        assert session.exhausted == spent
        stopped = [r for r in log.records if r.finish == "budget"]
        assert stopped and not any(r.trainable for r in stopped)
        assert session.budget_stops == len(stopped)
        assert len(policy.asked) + len(stopped) == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"model": "m", "input": "x", "stream": True}),
        ("/v1beta/models/m:generateContent", {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}),
    ],
)
async def test_a_budget_stop_is_not_empty_in_any_dialect(path, body):
    async with open_gate() as gate:
        session = await gate.open_session("r1", budget=Budget(calls=0))
        answer = await ask(gate, "POST", path, key=session.key, body=body)
        assert answer.status == 200
        assert b"budget of this task is used up" in answer.body


async def test_the_gate_says_why_a_rollout_could_not_be_reached():
    """K10"""
    gate = Gate(Answers())
    async with gate:
        session = await gate.open_session("r1")
        with pytest.raises(GateUnreachable, match="listens nowhere"):
            gate.check(session)
        listener = Listening()
        await gate.serve(listener, session)
        gate.check(session)
        assert not session.reached
        await ask(listener, "GET", "/v1/models", key=session.key)
        assert session.reached
    with pytest.raises(GateUnreachable, match="not running"):
        gate.check(session)
    with pytest.raises(GateUnreachable, match="not running"):
        await gate.serve(listener, session)


async def test_a_session_id_is_one_word_and_used_once():
    async with open_gate() as gate:
        await gate.open_session("r1")
        for bad in ("r1", "", "a/b", " r2"):
            with pytest.raises(ConfigError):
                await gate.open_session(bad)


async def test_models_and_token_counts_are_answered():
    async with open_gate() as gate:
        session = await gate.open_session("r1", settings={"model": "tiny"})
        listed = await ask(gate, "GET", "/v1/models", key=session.key)
        assert listed.json["data"][0]["id"] == "tiny"
        body = {"model": "m", "messages": [{"role": "user", "content": "how many tokens is this?"}]}
        counted = await ask(gate, "POST", "/v1/messages/count_tokens", key=session.key, body=body)
        assert counted.json["input_tokens"] > 0
        assert session.trajectory.records[0].kind == "auxiliary"
        assert session.trajectory.records[0].leaf is None


async def test_a_session_says_what_happened_in_its_log_tail():
    async with open_gate() as gate:
        session = await gate.open_session("r1")
        await ask(gate, "POST", CHAT, key=session.key, body=chat())
        await ask(gate, "POST", CHAT, key=session.key, body=b"{")
        tail = session.log_tail()
        assert "-> stop" in tail and "-> 400" in tail
        assert session.key not in tail


def test_the_clock_of_a_gate_stops_with_it():
    async def main():
        loop = asyncio.get_running_loop()
        async with open_gate(host=None, limits=GateLimits(tick_s=1)):
            await asyncio.sleep(10)
            assert loop.jumps.count >= 10
        before = loop.jumps.count
        await asyncio.sleep(100)
        assert loop.jumps.count == before + 1

    run_in_virtual_time(main())
