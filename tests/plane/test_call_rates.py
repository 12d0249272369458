"""The rate of requests that use instances: for each owner, once for a request, and never for what nobody outside asked for."""

import pytest

from rollyard.core.errors import PlaneRateLimited
from rollyard.plane.service.call_rates import CallRates
from rollyard.plane.service.request_note import CURRENT, RequestNote, note_creation
from tests.waiting import Clock


def ask(rates, owner):
    """A request of its own; what it waits for, or None."""
    token = CURRENT.set(RequestNote("native", "t"))
    try:
        rates.charge(owner)
        rates.charge(owner)  # the same request again counts no second time
    except PlaneRateLimited as error:
        return error.retry_after
    finally:
        CURRENT.reset(token)


def test_so_many_at_once_then_one_at_a_time():
    clock = Clock(100.0)
    rates = CallRates(2.0, 3, clock=clock)
    assert [ask(rates, "ann") for _ in range(4)] == [None, None, None, pytest.approx(0.5)]
    assert ask(rates, "bob") is None
    clock.now += 0.5
    assert [ask(rates, "ann") for _ in range(2)] == [None, pytest.approx(0.5)]
    clock.now += 100.0
    assert [ask(rates, "ann") is None for _ in range(4)] == [True, True, True, False]


def test_creations_the_sweep_and_a_server_without_a_rate_are_free():
    rates = CallRates(0.001, 1, clock=Clock(1.0))
    assert ask(rates, "ann") is None and ask(rates, "ann") is not None
    rates.charge("ann")  # nobody asks
    token = CURRENT.set(RequestNote("native", "t"))
    note_creation()
    rates.charge("ann")
    CURRENT.reset(token)
    assert [ask(CallRates(), "ann") for _ in range(9)] == [None] * 9
