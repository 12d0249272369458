"""What servers share: URLs of addresses, the ready line, counts, lists in pages, the general HTTP client."""

import json

import pytest
from aiohttp import web
from prometheus_client.core import HistogramMetricFamily

from rollyard.net.binding import http_url, listen
from rollyard.net.http_session import HttpFailure, HttpSession
from rollyard.net.metrics import Histogram, write_metrics
from rollyard.net.paging import each_page
from rollyard.net.ready import ServerReady

pytestmark = pytest.mark.anyio


def test_an_address_of_ipv6_stands_in_brackets():
    assert http_url("::1", 80) == "http://[::1]:80"
    assert http_url("127.0.0.1", 8443, secure=True) == "https://127.0.0.1:8443"
    with listen("::1", 0) as sock:
        assert http_url(*sock.getsockname()[:2]).startswith("http://[::1]:")


def test_the_ready_line_prints_no_variable_unless_it_is_asked_to():
    ready = ServerReady(
        server="plane", url="http://h:1", details="x", facts={"engines": ["local"]}, variables={"KEY": "s3cret"}
    )
    assert ready.line == "rollyard plane ready at http://h:1 (x)"
    assert json.loads(ready.json) == {"url": "http://h:1", "engines": ["local"]}
    assert ready.env == "KEY=s3cret"
    assert "s3cret" not in ready.line + ready.json


def test_a_histogram_counts_each_value_below_its_bound():
    histogram = Histogram((1.0, 10.0))
    for value in (0.5, 1.0, 1.5, 11.0):
        histogram.observe(value)
    family = HistogramMetricFamily("took_seconds", "time")
    histogram.add_to(family)
    lines = write_metrics([family]).decode().splitlines()
    assert 'took_seconds_bucket{le="1.0"} 2.0' in lines
    assert 'took_seconds_bucket{le="10.0"} 3.0' in lines
    assert 'took_seconds_bucket{le="+Inf"} 4.0' in lines
    assert "took_seconds_sum 14.0" in lines


@pytest.mark.parametrize("end", [None, ""])
async def test_pages_are_read_until_there_is_no_cursor(end):
    pages = {None: ([1, 2], "a"), "a": ([], "b"), "b": ([3], end)}

    async def read(cursor):
        return pages[cursor]

    assert [item async for item in each_page(read)] == [1, 2, 3]


@pytest.fixture
async def server():
    async def answer(request):
        if request.path == "/moved":
            raise web.HTTPFound("/else")
        if request.path == "/cut":
            request.transport.abort()
        response = web.Response(text=request.headers.get("cookie", "no cookie"), headers={"X-Kind": "plain"})
        response.set_cookie("seen", "yes")
        return response

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_the_client_keeps_no_cookie_and_follows_no_redirect(server):
    async with HttpSession() as session:
        for _ in range(2):
            found = await session.request("GET", server + "/here", timeout_s=10)
            assert (found.status, found.body, found.headers["x-kind"]) == (200, b"no cookie", "plain")
        assert (await session.request("GET", server + "/moved", timeout_s=10)).status == 302


async def test_what_is_no_answer_is_a_failure_with_a_name(server):
    async with HttpSession() as session:
        for url in (server + "/cut", "http://127.0.0.1:1/", "http://[bad"):
            with pytest.raises(HttpFailure) as failed:
                await session.request("GET", url, timeout_s=10)
            assert failed.value.kind.isidentifier()
            with pytest.raises(HttpFailure):
                await session.stream("GET", url, None, {}, connect_s=5, idle_s=5)
