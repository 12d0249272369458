"""What an agent, or anyone else who reaches the gate, must not be able to do."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import weakref

import pytest

from rollyard.core.errors import ConfigError, UpstreamError
from rollyard.core.ids import secret
from rollyard.gate import Budget, Gate, GateLimits, HttpLimits
from tests.gate.conftest import Answers, ask, chat, open_gate, port_of, request, said, send
from tests.memory import trace_memory
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]
CHAT = "/v1/chat/completions"
ADMIN, TRAINER = "admin-" + "a" * 20, "trainer-" + "t" * 20


async def test_a_key_reaches_its_own_rollout_and_no_other():
    """K4"""
    policy = Answers()
    async with open_gate(policy) as gate:
        one, two = await gate.open_session("r1"), await gate.open_session("r2")
        await ask(gate, "POST", CHAT, key=one.key, body=chat())
        assert one.calls == 1 and two.calls == 0
        for path in (f"/r/r2{CHAT}", "/r/r2/v1/models", "/r/r2/mcp"):
            assert (await ask(gate, "POST", path, key=one.key, body=chat())).status == 404
        assert [c.rollout_id for c in policy.asked] == ["r1"]


@pytest.mark.parametrize("key", ["", " ", "\t", "ry-", "none", "null", "r1", "Bearer"])
async def test_empty_blank_and_guessed_keys_open_nothing(key):
    async with open_gate() as gate:
        await gate.open_session("r1")
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-goog-api-key": key}):
            assert (await ask(gate, "POST", CHAT, headers=headers, body=chat())).status == 401
        assert (await ask(gate, "POST", CHAT, body=chat())).status == 401


@pytest.mark.parametrize("key", ["", "   ", "short", " padded-key-of-good-length "])
def test_an_operator_cannot_choose_a_key_that_is_no_secret(key):
    for name in ("admin_key", "trainer_key"):
        with pytest.raises(ConfigError):
            Gate(Answers(), **{name: key})
    with pytest.raises(ConfigError):
        Gate(Answers(), admin_key="k" * 20, trainer_key="k" * 20)


async def test_a_revoked_key_stays_dead_also_for_a_new_session_of_that_name():
    async with open_gate() as gate:
        session = await gate.open_session("r1")
        old = session.key
        await session.close()
        again = await gate.open_session("r1")
        assert again.key != old
        assert (await ask(gate, "POST", CHAT, key=old, body=chat())).status == 409
        assert (await ask(gate, "POST", CHAT, key=again.key, body=chat())).status == 200
        assert again.calls == 1


async def test_two_keys_that_disagree_are_refused():
    async with open_gate() as gate:
        one, two = await gate.open_session("r1"), await gate.open_session("r2")
        both = {"authorization": f"Bearer {one.key}", "x-api-key": two.key}
        assert (await ask(gate, "POST", CHAT, headers=both, body=chat())).status == 401
        agree = {"authorization": f"Bearer {one.key}", "x-api-key": one.key}
        assert (await ask(gate, "POST", CHAT, headers=agree, body=chat())).status == 200
        assert (await ask(gate, "POST", f"{CHAT}?key={two.key}", key=one.key, body=chat())).status == 401


async def test_ten_thousand_bad_keys_open_nothing_and_stop_nobody():
    async with open_gate() as gate:
        session = await gate.open_session("r1")

        async def knock(count: int) -> set[int]:
            seen = set()
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
            for _ in range(count):
                writer.write(request("GET", "/v1/models", key=secret("ry"), headers={"connection": "keep-alive"}))
                head = await reader.readuntil(b"\r\n\r\n")
                seen.add(int(head.split(b" ")[1]))
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
            writer.close()
            return seen

        knocking = asyncio.gather(*(knock(500) for _ in range(20)))
        good = 0
        while not knocking.done():
            good += (await ask(gate, "POST", CHAT, key=session.key, body=chat(f"{good}"))).status == 200
        assert set().union(*await knocking) == {401}
        assert good > 0
        assert gate.counters.bad_keys == 10_000
        await until(lambda: gate.connections == 0)


async def test_an_oversized_body_is_refused_before_it_is_kept():
    limits = GateLimits(tick_s=0.02, http=HttpLimits(body=100_000))
    async with open_gate(limits=limits) as gate:
        session = await gate.open_session("r1", budget=Budget(body=1000))
        assert (await ask(gate, "POST", CHAT, key=session.key, body=chat("x" * 5000))).status == 413
        assert (await ask(gate, "POST", CHAT, key=session.key, body=chat("x" * 100))).status == 200
        chunked = {"transfer-encoding": "chunked", "content-length": None}
        body = b"".join(b"1000\r\n" + b"x" * 0x1000 + b"\r\n" for _ in range(8)) + b"0\r\n\r\n"
        assert (await send(gate, request("POST", CHAT, key=session.key, headers=chunked) + body)).status == 413
        assert session.calls == 1


async def test_a_body_is_not_read_for_a_key_that_opens_nothing():
    async with open_gate() as gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
        writer.write(request("POST", CHAT, key="wrong-key-of-some-length", headers={"content-length": "1000000"}))
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


async def test_slow_senders_are_cut_off_and_others_are_served():
    limits = GateLimits(tick_s=0.02, http=HttpLimits(headers_s=0.2, body_s=0.3, linger_s=0.2, idle_s=0.3))
    async with open_gate(limits=limits) as gate:
        session = await gate.open_session("r1")
        slow = []
        for start in (
            b"",
            b"POST /v1/chat",
            b"POST / HTTP/1.1\r\nhost: x\r\n",
            request("GET", "/v1/models", key=session.key)[:-4],
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
            writer.write(start)
            slow.append((reader, writer))
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
        writer.write(request("POST", CHAT, key=session.key, headers={"content-length": "500"}) + b"{")
        slow.append((reader, writer))
        assert (await ask(gate, "POST", CHAT, key=session.key, body=chat())).status == 200
        for reader, writer in slow:
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
        await until(lambda: gate.connections == 0)


async def test_a_reader_that_never_reads_is_cut_off():
    limits = GateLimits(tick_s=0.02, http=HttpLimits(write_s=0.2))
    async with open_gate(Answers(lambda call: said("x" * 20_000_000)), limits=limits) as gate:
        session = await gate.open_session("r1")
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(gate), limit=1024)
        writer.write(request("POST", CHAT, key=session.key, body=chat()))
        await until(lambda: session.calls == 1)
        await until(lambda: gate.connections == 0)
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        "content-length: -1\r\n",
        "content-length: 5 5\r\n",
        "x-a: b\r\n folded: c\r\ncontent-length: 5\r\n",
        "host: a\r\nhost: b\r\ncontent-length: 0\r\n",
        "x a: b\r\ncontent-length: 0\r\n",
        "x-a\0: b\r\ncontent-length: 0\r\n",
    ],
)
async def test_a_request_that_two_readers_could_read_differently_is_refused(head):
    policy = Answers()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        sent = f"POST {CHAT} HTTP/1.1\r\nauthorization: Bearer {session.key}\r\n{head}\r\n".encode()
        smuggled = request("POST", CHAT, key=session.key, body=chat())
        answer = await send(gate, sent + b"hello" + smuggled)
        assert answer.status == 400
        assert policy.asked == []


async def test_a_second_authorization_header_is_refused():
    async with open_gate() as gate:
        one, two = await gate.open_session("r1"), await gate.open_session("r2")
        body = json.dumps(chat()).encode()
        sent = (
            f"POST {CHAT} HTTP/1.1\r\nauthorization: Bearer {one.key}\r\nauthorization: Bearer {two.key}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        assert (await send(gate, sent.encode() + body)).status == 400


async def test_headers_without_end_are_refused():
    async with open_gate() as gate:
        many = "".join(f"x-{n}: y\r\n" for n in range(200))
        assert (await send(gate, f"GET /health HTTP/1.1\r\n{many}\r\n".encode())).status == 431
        assert (await send(gate, b"GET /health HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n")).status == 431
        assert (await send(gate, b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\n\r\n")).status in (400, 414)


async def test_pipelined_requests_are_answered_in_order_and_bounded():
    async with open_gate() as gate:
        session = await gate.open_session("r1")
        one = request("GET", "/v1/models", key=session.key, headers={"connection": "keep-alive"})
        last = request("GET", "/health")
        answer = await send(gate, one * 3 + last)
        assert answer.body.count(b"HTTP/1.1 200 OK") == 3


async def pour(gate, first: bytes, flood: bytes, *, chunks: int) -> tuple[socket.socket, int]:
    """Send one request, then as much of a flood behind it as is taken within a moment: the open socket, and the bytes."""
    sock = socket.create_connection(("127.0.0.1", port_of(gate)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    sock.setblocking(False)
    loop, taken = asyncio.get_running_loop(), 0
    await loop.sock_sendall(sock, first)
    try:
        async with asyncio.timeout(1.0):
            for _ in range(chunks):
                await loop.sock_sendall(sock, flood)
                taken += len(flood)
    except (TimeoutError, ConnectionError):
        pass
    return sock, taken


@pytest.mark.parametrize("key", ["wrong-key-of-some-length", None])
async def test_what_is_sent_behind_an_unanswered_call_is_not_kept(key):
    """Bodies behind a held call, with a key that opens nothing or beyond `budget.body`: the sender waits, the gate keeps
    one read of them."""
    go = asyncio.Event()

    async def hold(call):
        await go.wait()
        return said("done")

    async with open_gate(Answers(hold)) as gate:
        session = await gate.open_session("r1", budget=Budget(body=1000))
        alive = {"connection": "keep-alive"}
        first = request("POST", CHAT, key=session.key, body=chat(), headers=alive)
        flood = request("POST", CHAT, key=key or session.key, body=b"x" * 10_000_000, headers=alive)
        with trace_memory() as traced:
            sock, taken = await pour(gate, first, flood, chunks=6)
            kept, _ = traced()
        assert session.calls == 1
        assert taken == 0, "the kernel keeps the sender waiting"
        assert kept < 4_000_000
        go.set()
        loop = asyncio.get_running_loop()
        seen = b""
        async with asyncio.timeout(20):
            while b"HTTP/1.1 4" not in seen:
                data = await loop.sock_recv(sock, 65536)
                assert data, f"closed after {seen!r}"
                seen += data
        sock.close()
        assert seen.startswith(b"HTTP/1.1 200 ")
        assert (b" 401 " if key else b" 413 ") in seen
        assert session.calls == 1


async def test_requests_behind_one_another_are_admitted_in_their_turn():
    """Each is answered with its own key's answer, whether it came in the same packet, later or in pieces."""
    go = asyncio.Event()

    async def hold(call):
        await go.wait()
        return said(call.messages[-1].parts[0].text)

    async with open_gate(Answers(hold)) as gate:
        session = await gate.open_session("r1")
        alive = {"connection": "keep-alive"}
        calls = [request("POST", CHAT, key=session.key, body=chat(f"say-{n}"), headers=alive) for n in range(3)]
        last = request("POST", CHAT, key="wrong-key-of-some-length", body=chat("never"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
        writer.write(calls[0] + calls[1] + calls[2][:80])
        await until(lambda: session.calls == 1)
        writer.write(calls[2][80:] + last)
        await writer.drain()
        go.set()
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert [answer.count(b"say-%d" % n) for n in range(3)] == [1, 1, 1]
        assert answer.index(b"say-0") < answer.index(b"say-1") < answer.index(b"say-2") < answer.index(b" 401 ")
        assert session.calls == 3


async def test_an_error_tells_an_agent_nothing_of_the_host():
    words = "http://10.1.2.3:8000 sk-live-4242 /home/trainer/run.py step 17"
    failures = [
        UpstreamError(words, status=500, body=words.encode()),
        UpstreamError(words, status=401, body=words.encode()),
        UpstreamError(words, status=429, body=words.encode(), retry_after=3),
        UpstreamError(words, status=418, body=words.encode()),
        RuntimeError(words),
        TimeoutError(words),
        KeyError(words),
    ]
    for failure in failures:

        def raising(call, failure=failure):
            raise failure

        async with open_gate(Answers(raising)) as gate:
            session = await gate.open_session("r1")
            for path, body in (
                (CHAT, chat()),
                ("/v1/responses", {"model": "m", "input": "x"}),
                ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": chat()["messages"]}),
                ("/v1beta/models/m:generateContent", {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}),
            ):
                answer = await ask(gate, "POST", path, key=session.key, body=body)
                assert answer.status >= 400
                for word in ("10.1.2.3", "sk-live", "trainer", "run.py", "Traceback", "KeyError"):
                    assert word.encode() not in answer.body
            assert all(words.split()[0] in (r.error or "") for r in session.trajectory.records), (
                "the host's record has it"
            )


async def test_health_says_nothing_but_ok():
    async with open_gate() as gate:
        await gate.open_session("r1")
        answer = await ask(gate, "GET", "/health")
        assert answer.status == 200
        assert answer.json == {"status": "ok"}
        assert set(answer.headers) == {"content-type", "content-length", "connection"}


async def test_a_sandbox_listener_has_no_operator_behind_it():
    from tests.gate.test_sessions import Listening

    async with open_gate(admin_key=ADMIN, trainer_key=TRAINER) as gate:
        session = await gate.open_session("r1")
        listener = Listening()
        await gate.serve(listener, session)
        for method, path in (
            ("GET", "/sessions"),
            ("POST", "/sessions"),
            ("GET", "/calls"),
            ("GET", "/metrics"),
            ("POST", "/pause"),
        ):
            for key in (ADMIN, TRAINER, session.key):
                assert (await ask(listener, method, path, key=key)).status in (401, 404)
        assert list(gate.sessions) == ["r1"]


async def test_no_key_serves_two_apis():
    async with open_gate(admin_key=ADMIN, trainer_key=TRAINER) as gate:
        session = await gate.open_session("r1")
        admin = [
            ("GET", "/sessions"),
            ("POST", "/sessions"),
            ("GET", "/sessions/r1"),
            ("DELETE", "/sessions/r1"),
            ("GET", "/metrics"),
        ]
        trainer = [("GET", "/calls"), ("GET", "/policy_version"), ("POST", "/pause"), ("POST", "/resume")]
        for method, path in admin:
            for key in (TRAINER, session.key, "", None):
                assert (await ask(gate, method, path, key=key)).status == 401
        for method, path in trainer:
            for key in (ADMIN, session.key, "", None):
                assert (await ask(gate, method, path, key=key)).status == 401
        for key in (ADMIN, TRAINER):
            assert (await ask(gate, "POST", CHAT, key=key, body=chat())).status == 401
        assert list(gate.sessions) == ["r1"]


async def test_without_operator_keys_their_apis_are_closed():
    async with open_gate() as gate:
        for path in ("/sessions", "/metrics", "/calls", "/policy_version"):
            for key in (None, "", "None", "x" * 20):
                assert (await ask(gate, "GET", path, key=key)).status == 401


@pytest.mark.parametrize(
    "path", ["/v1/../sessions", "//sessions", "/sessions/../v1/models", "/r/r1/../../sessions", "/%73essions"]
)
async def test_crooked_paths_lead_nowhere(path):
    async with open_gate(admin_key=ADMIN) as gate:
        session = await gate.open_session("r1")
        assert (await ask(gate, "GET", path, key=session.key)).status in (401, 404)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"[" * 100_000,
        b'{"model":"m","messages":' + b"[" * 5000,
        b"\xff\xfe",
        b"\0" * 100,
    ],
)
async def test_hostile_bodies_are_refused_in_the_dialect(body):
    async with open_gate() as gate:
        session = await gate.open_session("r1")
        for path in (CHAT, "/v1/responses", "/v1/messages", "/v1beta/models/m:generateContent"):
            answer = await ask(gate, "POST", path, key=session.key, body=body)
            assert answer.status == 400
            assert "error" in answer.json
        assert session.calls == 0


async def test_the_store_of_keys_holds_only_hashes(log):
    async with open_gate(log=log) as gate:
        session = await gate.open_session("r1", settings={"api_key": "sk-upstream-secret", "model": "m"})
        kept = repr(log.kept["r1"])
        assert session.key not in kept
        assert "sk-upstream-secret" not in kept


async def test_what_a_failed_call_read_is_given_back_without_the_garbage_collector():
    """A served gate collects seldom; an error holds the frames that it came through, and these what a server sent."""

    class Sent:
        pass

    kept = []

    def fail(call):
        sent = Sent()
        kept.append(weakref.ref(sent))
        raise UpstreamError("unreadable", status=502)

    async with open_gate(Answers(fail)) as gate:
        session = await gate.open_session("r1")
        gc.disable()
        try:
            assert (await ask(gate, "POST", CHAT, key=session.key, body=chat())).status == 502
            await until(lambda: kept and all(sent() is None for sent in kept))
        finally:
            gc.enable()
