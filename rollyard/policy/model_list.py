"""The models that a server lists, asked for once.

A list is no must: a server that has none is asked for what was named. One that cannot give its list now (it starts, it is busy,
no answer) is asked again later, and by one call at a time, so that the others never wait for it twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rollyard.core.errors import UpstreamError
from rollyard.policy.model_server import ServedModel, read_models

AGAIN_S, LONGEST_S = 2.0, 300.0  # before the next question after the first failure, and after many
NOT_NOW = (408, 425, 429)  # and every 5xx: the list may come later

Answer = tuple[str, tuple[int, bytes, float | None]]  # the url that was asked; its status, body and `Retry-After`


class ModelList:
    """`models` is empty while nothing is `known`, and where the server lists none. `trouble` is why nothing is known."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Answer]],
        refuse: Callable[[str, int, bytes], UpstreamError],
        limit_s: float,
        *,
        again_s: float = AGAIN_S,
    ) -> None:
        self.models: tuple[ServedModel, ...] = ()
        self.known = False
        self.trouble: UpstreamError | None = None
        self._ask, self._refuse, self._limit_s = ask, refuse, limit_s
        self._asking = asyncio.Lock()
        self._pause_s, self._again_at = again_s, 0.0

    async def learn(self) -> None:
        """Ask, unless it is known. Raises when no server answers or the key is refused; any other refusal is `trouble`."""
        async with self._asking:
            if not self.known:
                await self._learn()

    async def learn_for_call(self) -> None:
        """As `learn`, but in silence, and not again so soon after a failure."""
        if self.known or time.monotonic() < self._again_at:
            return
        async with self._asking:
            if self.known or time.monotonic() < self._again_at:
                return
            if self.trouble is not None:  # the others know it by now, and go on
                self._again_at = time.monotonic() + self._limit_s
            try:
                await self._learn()
            except UpstreamError:  # the call itself says better what is wrong
                return

    async def _learn(self) -> None:
        try:
            try:
                async with asyncio.timeout(self._limit_s):
                    url, (status, body, _) = await self._ask()
            except TimeoutError:
                self._note(UpstreamError(f"no list of models came in {self._limit_s:.0f} s", status=504))
                return
            if status == 401:
                raise self._refuse(url, status, body)
        except UpstreamError as error:
            self._note(error)
            raise
        if status >= 500 or status in NOT_NOW:
            self._note(self._refuse(url, status, body))
            return
        self.models = read_models(body) if status == 200 else ()
        self.trouble = None if status == 200 else self._refuse(url, status, body)
        self.known = True

    def _note(self, trouble: UpstreamError) -> None:
        self.trouble, self._again_at = trouble, time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_S)
