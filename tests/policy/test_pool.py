"""The connection to a model server, against bytes that a test decides: what is whole is taken, what is not is an error."""

import asyncio
import gzip

import pytest

from rollyard.core.errors import UpstreamError
from rollyard.net.http_client import BadAnswer, HttpPool
from rollyard.policy.connection import ModelConnection, Timeouts
from tests.waiting import settle, until

pytestmark = pytest.mark.anyio

BODY = b'{"ok": true}'


@pytest.fixture
async def speaking():
    """`url, seen = await speaking(answer, ...)`: a raw server that says these bytes, one answer per request."""
    servers = []

    async def start(*answers, close=False):
        seen, left = [], list(answers)

        async def serve(reader, writer):
            seen.append([])
            while left:
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    break
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                seen[-1].append(head + await reader.readexactly(length))
                writer.write(left.pop(0))
                try:
                    await writer.drain()
                except ConnectionResetError:  # the client had enough
                    break
                if close:
                    break
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x", seen

    yield start
    for server in servers:
        server.close()


def whole(body=BODY, status="200 OK", *headers):
    head = "".join(f"{h}\r\n" for h in headers)
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{head}\r\n".encode() + body


async def asked(url, *, headers=None, total=2.0):
    connection = ModelConnection(timeouts=Timeouts(total=total))
    try:
        return await connection.post(url, b"{}", headers or {})
    finally:
        await connection.aclose()


async def test_one_connection_carries_many_requests(speaking):
    url, seen = await speaking(whole(b"1"), whole(b"2"), whole(b"3"))
    connection = ModelConnection()
    assert [await connection.post(url, b"{}", {}) for _ in range(3)] == [b"1", b"2", b"3"]
    assert [len(requests) for requests in seen] == [3]
    await connection.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        whole(),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n"
        + BODY[:5]
        + b"\r\n7\r\n"
        + BODY[5:]
        + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.1 100 Continue\r\n\r\n" + whole(),
        whole(gzip.compress(BODY), "200 OK", "content-encoding: gzip"),
    ],
    ids=["length", "chunked", "until-close", "http-1.0", "continue", "gzip"],
)
async def test_every_way_to_frame_an_answer_is_understood(speaking, answer):
    url, _ = await speaking(answer, close=True)
    assert await asked(url) == BODY


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9\r\n",
        whole()[:-3],
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        whole(b"nonsense", "200 OK", "content-encoding: gzip"),
        whole(BODY, "200 OK", "content-encoding: br"),
    ],
    ids=["nothing", "not-http", "short", "cut-chunk", "bad-chunk", "not-gzip", "unknown-packing"],
)
async def test_an_answer_that_is_cut_or_garbled_is_an_error_never_a_short_body(speaking, answer):
    url, _ = await speaking(answer, close=True)
    with pytest.raises(UpstreamError) as broken:
        await asked(url)
    assert broken.value.status == 502


async def test_a_packed_answer_that_unpacks_too_far_is_refused(speaking):
    bomb = gzip.compress(b"x" * 100_000)
    url, _ = await speaking(whole(bomb, "200 OK", "content-encoding: gzip"))
    pool = HttpPool(connect_s=1, idle_s=1, max_body=10_000)
    with pytest.raises(BadAnswer, match="large"):
        await pool.exchange("POST", url, b"{}", {}, 2.0)
    await pool.aclose()


async def test_a_body_beyond_the_limit_is_refused_while_it_comes(speaking):
    url, _ = await speaking(whole(b"x" * 100_000))
    pool = HttpPool(connect_s=1, idle_s=1, max_body=10_000)
    with pytest.raises(BadAnswer, match="large"):
        await pool.exchange("POST", url, b"{}", {}, 2.0)
    await pool.aclose()


@pytest.mark.adversarial
@pytest.mark.parametrize(
    "headers",
    [
        b"x: " + b"y" * 4_000_000,
        b"x" * 4_000_000,
        b"".join(b"x%d: y\r\n" % n for n in range(400_000)),
    ],
    ids=["one value", "one name", "many"],
)
async def test_headers_without_end_are_refused_while_they_come(speaking, headers):
    url, _ = await speaking(b"HTTP/1.1 200 OK\r\n" + headers)
    pool = HttpPool(connect_s=1, idle_s=1, max_body=10_000)
    with pytest.raises(BadAnswer, match="headers are too large"):
        await pool.exchange("POST", url, b"{}", {}, 20.0)
    await pool.aclose()


@pytest.mark.adversarial
async def test_trailers_without_end_are_refused(speaking):
    trailers = b"".join(b"x%d: y\r\n" % n for n in range(400_000))
    url, _ = await speaking(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + trailers)
    pool = HttpPool(connect_s=1, idle_s=1, max_body=10_000)
    with pytest.raises(BadAnswer, match="headers are too large"):
        await pool.exchange("POST", url, b"{}", {}, 20.0)
    await pool.aclose()


async def test_silence_ends_at_the_deadline(speaking):
    url, _ = await speaking(b"HTTP/1.1 200 OK\r\n", whole())  # it stays open, waiting for a next request
    with pytest.raises(UpstreamError) as late:
        await asked(url, total=0.1)
    assert late.value.status == 504


async def test_each_of_several_requests_ends_at_its_own_deadline(speaking):
    """They share a timer: one that is due before it moves it, one that is due later outlives it."""
    url, seen = await speaking(*[b"HTTP/1.1 200 OK\r\n"] * 4)
    pool = HttpPool(connect_s=10.0, idle_s=4.0, max_body=1024)
    patient = asyncio.create_task(pool.exchange("POST", url, b"{}", {}, 60.0))
    async with asyncio.timeout(30.0):
        late = await asyncio.gather(
            *(pool.exchange("POST", url, b"{}", {}, total) for total in (0.3, 0.1)), return_exceptions=True
        )
    assert [type(error) for error in late] == [TimeoutError, TimeoutError] and not patient.done()
    patient.cancel()
    await asyncio.gather(patient, return_exceptions=True)
    await pool.aclose()


async def test_bytes_after_an_answer_never_become_the_next_one(speaking):
    """Response splitting: what a server says unasked is not kept for the next request."""
    url, seen = await speaking(whole(b"1") + whole(b"poison"), whole(b"2"))
    connection = ModelConnection()
    first = await connection.post(url, b"{}", {})
    await settle()
    second = await connection.post(url, b"{}", {})
    assert (first, second) == (b"1", b"2")
    await connection.aclose()


@pytest.mark.parametrize("value", ["a\r\nx-evil: 1", "a\nb", "a\rb", "a\r\n\r\nGET / HTTP/1.1"])
async def test_a_header_cannot_smuggle_another(speaking, value):
    url, seen = await speaking(whole())
    with pytest.raises(UpstreamError):
        await asked(url, headers={"authorization": value})
    assert seen in ([], [[]])


async def test_a_cancelled_request_cuts_its_connection_and_the_next_one_is_clean(speaking):
    url, seen = await speaking(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\npart", whole(b"2"))
    connection = ModelConnection()
    cut = asyncio.create_task(connection.post(url, b"{}", {}))
    await until(lambda: seen and seen[0])
    await settle()
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    assert await connection.post(url, b"{}", {}) == b"2" and len(seen) == 2
    await connection.aclose()
