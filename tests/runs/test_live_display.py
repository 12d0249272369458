"""The live display, drawn from events at a clock of the test's."""

import io

import pytest
from rich.console import Console

from rollyard.core.events import Event
from rollyard.core.rollout import Failure, Rollout
from rollyard.core.task import Task
from rollyard.runs.display.live import LiveDisplay
from tests.waiting import Clock

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def live(clock):
    shown = LiveDisplay(io.StringIO(), clock)
    with shown:
        shown.begin("run_1", 4, 2)
        yield shown


def drawn(live, columns=80):
    out = io.StringIO()
    Console(file=out, width=columns).print(live.draw())
    return out.getvalue().splitlines()


def ended(number, **fields):
    return Rollout(id=f"ro_{number}", task=Task(id="t", instruction="x"), agent="pi", **fields)


def failure(message):
    return Failure(
        boundary="policy", cause="PolicyError", message=message, stage="wait", retry=True, grade=False, trainable=False
    )


async def start(live, number, task):
    fields = {"task": task, "attempt": 0, "agent": "pi", "policy": "mine"}
    await live.event(Event(at=0, name="rollout.started", rollout_id=f"ro_{number}", fields=fields))
    await live.event(Event(at=0, name="stage.started", rollout_id=f"ro_{number}", fields={"stage": "wait"}))


async def test_a_rollout_that_takes_long_gets_a_line_with_its_stage_and_seconds(live, clock):
    await start(live, 1, "slow-one")
    clock.now += 5
    await start(live, 2, "quick-one")
    clock.now += 42
    lines = drawn(live)
    assert "in flight: wait 2" in lines
    assert [line.split() for line in lines if "-one" in line] == [
        ["47", "s", "slow-one", "pi", "mine", "wait"],
        ["42", "s", "quick-one", "pi", "mine", "wait"],
    ]


async def test_an_install_says_at_once_what_it_is_and_how_much_is_there(live, clock):
    await start(live, 1, "slow-one")
    await live.event(Event(at=0, name="stage.started", rollout_id="ro_1", fields={"stage": "install"}))
    fields = {"packages": "@some/agent@1.2.3", "megabytes": 12.3}
    await live.event(Event(at=0, name="agent.installs", rollout_id="ro_1", fields=fields))
    assert "     0 s  slow-one  pi  mine  install (once) 12 MB so far: @some/agent@1.2.3" in drawn(live)
    await live.event(Event(at=0, name="stage.started", rollout_id="ro_1", fields={"stage": "wait"}))
    assert not any("12 MB" in line for line in drawn(live))


async def test_rate_time_left_and_tokens_are_those_of_what_has_ended(live, clock):
    clock.now += 30
    live.rollout(ended(1, usage={"prompt_tokens": 20_500, "completion_tokens": 300}))
    head, sums = drawn(live)[:2]
    assert "1/4 attempts, 2 done before  90 s left  run run_1" in head
    assert sums == "no reward yet  2.0 a minute  20k tokens in  300 tokens out"


async def test_the_bar_below_a_rollout_that_ended_counts_it():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with LiveDisplay(out, Clock(100.0)) as shown:
        shown.begin("run_1", 4, 0)
        shown.rollout(ended(1))
        line, below = out.getvalue().rsplit("no reward  0 calls", 1)
    assert "1/4 attempts" in below and "0/4 attempts" not in below


async def test_failures_that_say_the_same_are_one_line_with_a_count(live):
    for number in range(3):
        live.rollout(ended(number, status="infra_error", failure=failure(f"no answer within {number + 10} s")))
    assert [line.strip() for line in drawn(live) if " x " in line] == ["3 x  policy: no answer within 10 s"]


@pytest.mark.parametrize("columns", [40, 80, 160])
async def test_no_line_is_longer_than_the_terminal(live, clock, columns):
    await start(live, 1, "a-task-with-a-rather-long-name-" * 4)
    live.rollout(ended(2, status="infra_error", failure=failure("word " * 80)))
    clock.now += 1000
    assert max(map(len, drawn(live, columns))) <= columns
