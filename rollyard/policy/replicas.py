"""Which of several equal model servers answers a call.

A server keeps the prompts that it computed last, so a call is cheapest where the call that it continues was answered. It goes
there; a call that continues nothing goes where its rollout was before (the system prompt is the same), and the first one of a
rollout to the server with the least in flight. A server that does not answer is left alone for a while, one that says it is
busy, or has far more to do than another, for this call: then another one computes the prompt again. Sampling changes nothing
on a server, so a call may be sent to another one after the first was lost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rollyard.core.call import Call
from rollyard.core.errors import ConfigError, UpstreamError
from rollyard.policy.admission import BUSY, Admission
from rollyard.policy.connection import check_url

T = TypeVar("T")
LOST = (502,)  # the status of a server that is gone
DOWN_S = 10.0  # how long a lost server is not asked
MOST_MORE = 8  # calls in flight more than the least of all, before a rollout moves
# what routers read to keep a session on one server: vLLM's, SGLang's, and others
ROUTING_HEADERS = ("x-session-id", "x-smg-routing-key")


def split_urls(url: str | Sequence[str]) -> tuple[str, ...]:
    """One url, several with commas between, or a list of them; each as `check_url` gives it."""
    given = url.split(",") if isinstance(url, str) else list(url)
    urls = tuple(dict.fromkeys(check_url(one.strip()) for one in given))
    if not urls:
        raise ConfigError("a policy needs the url of a model server")
    return urls


def routing_headers(rollout_id: str) -> dict[str, str]:
    return dict.fromkeys(ROUTING_HEADERS, rollout_id)


class Replicas:
    """`counts` has, per url, how many calls it answered, and over all how many were `followed` (answered where the call
    before was), `moved_lost`, `moved_busy` and `moved_loaded`. `max_waiting` is for `admission`."""

    def __init__(self, urls: Sequence[str], *, max_waiting: int | None = None) -> None:
        self.urls = tuple(urls)
        self.counts: Counter[str] = Counter()
        self._admission = None if max_waiting is None else Admission(max_waiting, self.counts)
        self._in_flight = [0] * len(self.urls)
        self._down_until = [0.0] * len(self.urls)
        self._homes: dict[str, dict[str, int]] = {}  # rollout -> call -> the server that answered it, in order

    def send(self, call: Call, ask: Callable[[str], Awaitable[T]]) -> Awaitable[T]:
        """What `ask` gives for the url of the server that is chosen."""
        admission = self._admission
        if admission is None:
            return ask(self.urls[0]) if len(self.urls) == 1 else self._send(call, ask)

        async def ask_admitted(url: str) -> T:
            await admission.enter(url)
            return await ask(url)

        return admission.ask_again(lambda: self._send(call, ask_admitted))

    async def _send(self, call: Call, ask: Callable[[str], Awaitable[T]]) -> T:
        if len(self.urls) == 1:
            return await ask(self.urls[0])
        tried: set[int] = set()
        while True:
            home = self._find_home(call)
            at = self._choose(home, tried)
            self._in_flight[at] += 1
            try:
                answer = await ask(self.urls[at])
            except UpstreamError as error:
                tried.add(at)
                if error.status not in (*LOST, *BUSY) or len(tried) == len(self.urls):
                    raise
                if error.status in LOST:
                    self._down_until[at] = time.monotonic() + DOWN_S
                self.counts["moved_lost" if error.status in LOST else "moved_busy"] += 1
                continue
            finally:
                self._in_flight[at] -= 1
            self.counts[self.urls[at]] += 1
            self.counts["followed"] += at == home
            self._homes.setdefault(call.rollout_id, {})[call.id] = at
            return answer

    async def first(self, ask: Callable[[str], Awaitable[T]]) -> tuple[str, T]:
        """The first server that answers a question to which all have the same answer, with its answer."""
        for url in self.urls[:-1]:
            try:
                return url, await ask(url)
            except UpstreamError as error:
                if error.status not in LOST:
                    raise
        return self.urls[-1], await ask(self.urls[-1])

    def _find_home(self, call: Call) -> int | None:
        """Where the call itself was begun, where the one before it was answered, or where its rollout was last."""
        homes = self._homes.get(call.rollout_id)
        if not homes:
            return None
        before = call.continues.call_id if call.continues is not None else ""
        return next((homes[name] for name in (call.id, before) if name in homes), next(reversed(homes.values())))

    def _choose(self, home: int | None, tried: set[int]) -> int:
        now = time.monotonic()
        left = [at for at in range(len(self.urls)) if at not in tried]
        up = [at for at in left if self._down_until[at] <= now] or left
        least = min(up, key=lambda at: (self._in_flight[at], self.counts[self.urls[at]]))
        if home not in up:
            return least
        if self._in_flight[home] > self._in_flight[least] + MOST_MORE:
            self.counts["moved_loaded"] += 1
            return least
        return home

    async def aclose(self) -> None:
        if self._admission is not None:
            await self._admission.aclose()

    def forget(self, rollout_id: str) -> None:
        self._homes.pop(rollout_id, None)
