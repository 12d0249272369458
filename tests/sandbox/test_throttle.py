"""How many opens at once, how many a second, and how many may live (S3). Rates and waits are judged in virtual time."""

import asyncio

import anyio
import pytest

from rollyard.core.errors import ConfigError, SandboxInterrupted, SandboxUnavailable
from rollyard.sandbox.retry import OpenLimits, Throttle, retry_open
from tests.virtual_time import run_in_virtual_time


def test_opens_are_spread_to_the_rate_whatever_asks_for_them():
    async def main():
        loop = asyncio.get_running_loop()
        throttle, starts = Throttle(OpenLimits(creates_per_s=20, opening=50)), []

        async def one():
            async with throttle.place(0):
                starts.append(loop.time())

        await asyncio.gather(*(one() for _ in range(11)))
        assert starts == pytest.approx([number / 20 for number in range(11)])

    run_in_virtual_time(main())


@pytest.mark.anyio
async def test_no_more_opens_run_at_once_than_allowed():
    throttle = Throttle(OpenLimits(opening=3))
    running, most = 0, 0

    async def one():
        nonlocal running, most
        async with throttle.place(0):
            running += 1
            most = max(most, running)
            await anyio.sleep(0.01)
            running -= 1

    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(one)
    assert most == 3


@pytest.mark.anyio
async def test_too_many_live_ones_are_refused_not_waited_for():
    throttle = Throttle(OpenLimits(live=2))
    with pytest.raises(SandboxUnavailable, match="the limit is 2"):
        async with throttle.place(2):
            pass


@pytest.mark.anyio
async def test_an_open_that_fails_or_is_cancelled_gives_its_place_back():
    throttle = Throttle(OpenLimits(opening=1))
    with pytest.raises(ValueError):
        async with throttle.place(0):
            raise ValueError
    with anyio.move_on_after(0.05):
        async with throttle.place(0):
            await anyio.sleep_forever()
    with anyio.fail_after(5):
        async with throttle.place(0):
            pass


@pytest.mark.anyio
@pytest.mark.parametrize("idempotent", [False, True])
async def test_only_what_may_be_repeated_is_repeated(idempotent):
    tries = []

    async def breaks():
        tries.append(1)
        if len(tries) < 3:
            raise SandboxInterrupted("after it was sent")
        return "done"

    limits = OpenLimits(wait_initial_s=0.01, wait_max_s=0.02)
    if idempotent:
        assert await retry_open(breaks, limits, idempotent=True) == "done"
    else:
        with pytest.raises(SandboxInterrupted):
            await retry_open(breaks, limits)
        assert len(tries) == 1


def test_a_wait_that_the_server_asks_for_is_kept():
    async def main():
        at = []

        async def busy():
            at.append(asyncio.get_running_loop().time())
            if len(at) < 2:
                raise SandboxUnavailable("later", retry_after=30)

        await retry_open(busy, OpenLimits(wait_initial_s=0.01, wait_max_s=0.02))
        assert at[1] - at[0] == pytest.approx(30)

    run_in_virtual_time(main())


@pytest.mark.parametrize("name", ["attempts", "opening", "creates_per_s", "live", "wait_initial_s", "wait_max_s"])
def test_a_limit_that_is_not_positive_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=name):
        OpenLimits(**{name: 0})
