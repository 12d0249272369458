"""Calls go to a model server as its own queue has room, instead of a fixed number at a time (`max_waiting` of a policy).

A server says under `/metrics` how many requests wait there. While there are more than `max_waiting`, calls wait here, in front of
it; a reading lets as many go as the queue has room for. A server that refuses with 429 or 503 and says when to come back
(`Retry-After`) is asked again then. What it is not: a bound on a server that says neither; that one is asked at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollyard.core.errors import UpstreamError
from rollyard.core.log import Log
from rollyard.policy.connection import ModelConnection, Timeouts

T = TypeVar("T")
_log = Log("rollyard.policy")
READ_S = 0.25  # how old a reading of a queue may be
LONGEST_S = 60.0  # that a server's Retry-After is believed
BUSY = (429, 503)
# requests that wait, as vLLM, SGLang and llama.cpp call them
QUEUES = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")


class _Server:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.read_at = float("-inf")
        self.places: int | None = 0  # calls that may go until the next reading; None: it does not say


class Admission:
    """`counts` is given `held_queue` and `held_retry_after`: calls that waited for either."""

    def __init__(self, max_waiting: int, counts: Counter[str]) -> None:
        self._max_waiting = max_waiting
        self._counts = counts
        self._connection = ModelConnection(timeouts=Timeouts(connect=5.0, total=10.0))
        self._servers: dict[str, _Server] = {}

    async def enter(self, url: str) -> None:
        """Returns once the server at `url` has room for one call more."""
        if await self._may_go(url):
            return
        self._counts["held_queue"] += 1
        while not await self._may_go(url):  # noqa: ASYNC110 - a server sends no word when its queue has room
            await asyncio.sleep(READ_S)

    async def ask_again(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` gives; a server that is busy is asked again when it says."""
        while True:
            try:
                return await ask()
            except UpstreamError as error:
                if error.status not in BUSY or error.retry_after is None:
                    raise
                self._counts["held_retry_after"] += 1
                await asyncio.sleep(min(error.retry_after, LONGEST_S))

    async def _may_go(self, url: str) -> bool:
        server = self._servers.setdefault(url, _Server())
        async with server.lock:
            if time.monotonic() - server.read_at >= READ_S:
                server.places = await self._read(url)
                server.read_at = time.monotonic()
            if server.places is None:
                return True
            server.places -= 1
            return server.places >= 0

    async def _read(self, url: str) -> int | None:
        try:
            status, body, _ = await self._connection.exchange("GET", url.removesuffix("/v1") + "/metrics", None, {})
        except UpstreamError:
            return None  # the call itself will say what is wrong
        waiting = read_queue(body.decode("utf-8", "replace")) if status == 200 else None
        if waiting is None and self._servers[url].places is not None:
            _log.warning("%s/metrics does not say how many requests wait: calls go to it at once", url)
        return None if waiting is None else max(0, self._max_waiting - waiting + 1)

    async def aclose(self) -> None:
        await self._connection.aclose()


def read_queue(metrics: str) -> int | None:
    """The requests that wait, over all engines of a server; None where the page does not say."""
    found = [line.rsplit(" ", 1)[-1] for line in metrics.splitlines() if line.split("{")[0].split(" ")[0] in QUEUES]
    try:
        return int(sum(float(value) for value in found)) if found else None
    except ValueError:
        return None
