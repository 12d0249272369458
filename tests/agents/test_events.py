"""Output of real runs, whole and mangled, becomes typed events (G6). `output/` holds what each agent printed."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import agents
from rollyard.core.agent import Agent

OUTPUT = Path(__file__).parent / "output"
NAMES = sorted(path.stem.replace("_", "-") for path in OUTPUT.glob("*.ok"))


def output(name: str, how: str) -> bytes:
    return (OUTPUT / f"{name.replace('-', '_')}.{how}").read_bytes()


def read(name: str, data: bytes, step: int = 1 << 20):
    parser = agents.parse(agents.get(name))
    events = [event for i in range(0, len(data), step) for event in parser.feed(data[i : i + step])]
    return events + parser.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_solved_task_ends_with_done_and_ok_or_with_its_exit_code(name):
    events = read(name, output(name, "ok"))
    assert [event.ok for event in events if event.kind == "done"] == ([True] if agents.get(name).says_done else [])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mini-swe-agent"])
def test_a_tool_call_its_result_and_the_last_words_are_seen(name):
    events = read(name, output(name, "ok"))
    (call,) = [event for event in events if event.kind == "tool_call"]
    (result,) = [event for event in events if event.kind == "tool_result"]
    assert "echo hello > out.txt" in str(call.fields)
    assert call.call_id == result.call_id
    assert [event.text for event in events if event.kind == "assistant"] == ["done"]
    assert name == "openhands" or [event for event in events if event.kind == "usage"]


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_run_ends_with_done_and_not_ok_whatever_the_exit_code_says(name):
    events = read(name, output(name, "failed"))
    assert [event.ok for event in events if event.kind == "done"] == [False]
    assert name == "mini-swe-agent" or "boom from policy" in "".join(event.text for event in events)


@settings(max_examples=25, deadline=None)
@given(step=st.integers(1, 4000))
@pytest.mark.parametrize("name", ["claude-code", "goose"])
def test_where_the_stream_is_cut_does_not_matter(name, step):
    assert read(name, output(name, "ok"), step) == read(name, output(name, "ok"))


@pytest.mark.parametrize("name", agents.names())
def test_text_that_is_not_the_agents_format_is_kept_as_raw(name):
    lines = [b"Warning: a banner", b'{"type": 5}', b'{"type":', b"[1]", b"null", b'{"type":"result"}', b"{" * 3000]
    events = read(name, b"\n".join(lines))
    assert {event.kind for event in events} <= {"raw"}
    assert "Warning: a banner" in [event.text for event in events]


def test_a_ten_megabyte_line_comes_through_whole():
    big = "x" * 10_000_000
    line = '{"type":"item.completed","item":{"id":"i","type":"agent_message","text":"' + big + '"}}\n'
    events = read("codex", line.encode() + output("codex", "ok"), step=65536)
    assert events[0].kind == "assistant" and len(events[0].text) == len(big)
    assert events[-1].kind == "done"


def test_invalid_utf8_is_shown_and_does_not_lose_the_line():
    line = b'{"type":"item.completed","item":{"id":"i","type":"agent_message","text":"a\xff\xfeb"}}'
    (event,) = read("codex", line)
    assert event.text == "a\ufffd\ufffdb"


def test_a_character_cut_in_two_is_put_together():
    data = '{"type":"item.completed","item":{"id":"i","type":"agent_message","text":"ž日🦆"}}\n'.encode()
    (event,) = read("codex", data, step=1)
    assert event.text == "ž日🦆"


def test_a_line_without_end_is_cut_and_memory_stays_bounded():
    from rollyard.agents.events import EventParser

    parser = EventParser(Agent(name="loud"), max_line=1000)
    events = [event for _ in range(100) for event in parser.feed(b"y" * 100)] + parser.close()
    assert sum(len(event.text) for event in events) == 10_000
    assert max(len(event.text) for event in events) <= 1100


def test_an_agent_without_a_parser_gives_raw_lines():
    parser = agents.parse(Agent(name="plain"))
    assert [e.text for e in parser.feed(b"one\r\n\ntwo") + parser.close()] == ["one", "two"]
