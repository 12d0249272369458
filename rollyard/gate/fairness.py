"""Whose call goes to its policy next.

Each rollout is a lane. A lane has a bound of its own, all lanes together have one, and free places go round the waiting
lanes one by one, so a rollout with a thousand waiting calls delays another rollout's call by one place, not by a thousand.
A lane's queue is bounded too: overflow is an answer (503), never a drop. While paused, nothing is admitted and nothing is
refused: the calls wait for the weights.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Busy(Exception):
    """No place became free in time; `retry_after` is a guess in seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("no place became free in time")
        self.retry_after = retry_after


class Lane:
    """The calls of one rollout: how many are at its policy, how many may be, and those that wait."""

    __slots__ = ("active", "bound", "waiting")

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.active = 0
        self.waiting: deque[asyncio.Future[None]] = deque()


class FairQueue:
    """`places` calls may be at their policies at once; at most `queue` wait, each for at most `wait_s`."""

    def __init__(self, places: int, *, queue: int, wait_s: float) -> None:
        self.free = places
        self._places = places
        self._idle: list[asyncio.Future[None]] = []
        self.paused = False
        self._queue = queue
        self._wait_s = wait_s
        self._ring: deque[Lane] = deque()  # lanes with someone waiting

    @property
    def waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self._ring)

    @property
    def active(self) -> int:
        """How many are at their policies now."""
        return self._places - self.free

    async def idle(self) -> None:
        """Return when no call is at a policy; meant for after `pause`."""
        while self.active:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    def enter_now(self, lane: Lane) -> bool:
        """Take a place if that needs no waiting, which is followed by one `leave`."""
        if self.paused or self.free <= 0 or lane.active >= lane.bound or lane.waiting:
            return False
        self.free -= 1
        lane.active += 1
        return True

    async def enter(self, lane: Lane) -> None:
        """Take a place; every `enter` that returns is followed by one `leave`."""
        if self.enter_now(lane):
            return
        if len(lane.waiting) >= self._queue:
            raise Busy(self._wait_s)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not lane.waiting:
            self._ring.append(lane)
        lane.waiting.append(place)
        try:
            await self._grant(place)
        except BaseException:  # cancelled or too late: a place granted in the same instant goes back
            if place.done() and not place.cancelled():
                self.leave(lane)
            else:
                self._forget(lane, place)
            raise

    async def _grant(self, place: asyncio.Future[None]) -> None:
        while True:
            try:
                async with asyncio.timeout(self._wait_s):
                    await asyncio.shield(place)
                return
            except TimeoutError:
                if not self.paused:
                    raise Busy(self._wait_s) from None

    def leave(self, lane: Lane) -> None:
        lane.active -= 1
        self.free += 1
        if self._ring:
            self._admit()
        if self._idle and not self.active:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._admit()

    def _admit(self) -> None:
        if self.paused:
            return
        passed = 0
        while self._ring and self.free > 0 and passed < len(self._ring):
            lane = self._ring[0]
            self._ring.rotate(-1)
            if lane.active >= lane.bound:
                passed += 1
                continue
            passed = 0
            place = lane.waiting.popleft()
            if not lane.waiting:
                self._ring.remove(lane)
            if not place.done():
                self.free -= 1
                lane.active += 1
                place.set_result(None)

    def _forget(self, lane: Lane, place: asyncio.Future[None]) -> None:
        try:
            lane.waiting.remove(place)
        except ValueError:
            return
        if not lane.waiting:
            self._ring.remove(lane)
