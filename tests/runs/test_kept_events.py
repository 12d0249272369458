"""An agent that prints without end: what the host keeps of it is bounded, and its end is kept."""

import pytest

from rollyard.agents.events import MAX_LINE, EventParser
from rollyard.core.agent import Agent
from rollyard.core.events import AgentEvent
from rollyard.runs.rollout.kept_events import HEAD, MAX_BYTES, MAX_EVENTS, MAX_TOLD, KeptEvents

pytestmark = pytest.mark.adversarial


def test_a_flood_of_lines_keeps_its_beginning_and_its_end():
    kept = KeptEvents()
    for number in range(300_000):
        kept.add(AgentEvent(kind="raw", text=str(number)))
    numbers = [int(event.text) for event in kept]
    assert len(numbers) <= HEAD + 2 * MAX_EVENTS
    assert numbers[:HEAD] == list(range(HEAD))
    assert numbers[-MAX_EVENTS:] == list(range(300_000 - MAX_EVENTS, 300_000))
    assert len(numbers) + kept.dropped == 300_000


@pytest.mark.parametrize("event", [{"text": "x" * 10**6}, {"fields": {"output": "x" * 10**6}}])
def test_a_flood_of_large_events_is_bounded_by_its_size(event):
    kept = KeptEvents()
    for _ in range(500):
        kept.add(AgentEvent(kind="text", **event))
    assert len(list(kept)) * 10**6 <= 2 * MAX_BYTES + 10**6


def test_the_store_is_told_a_bounded_number():
    kept = KeptEvents()
    assert sum(kept.may_tell() for _ in range(MAX_TOLD + 10)) == MAX_TOLD


def test_a_line_without_end_is_cut():
    parser = EventParser(Agent(name="loud"))
    events = [event for _ in range(40) for event in parser.feed(b"x" * 2**20)]
    assert events
    assert max(len(event.text) for event in events) <= MAX_LINE + 2**20
