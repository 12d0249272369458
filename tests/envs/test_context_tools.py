"""Context tools in a loop that keeps a chat history, and over MCP."""

from __future__ import annotations

import pytest

from rollyard.envs.fleet.context_tools import Chat, ContextTools, text_of
from rollyard.testing.serve import serve_app
from rollyard.tools import RemoteTools, Toolset

pytestmark = pytest.mark.anyio


def chat(turns):
    history = [{"role": "system", "content": "You work."}, {"role": "user", "content": "Find the needle."}]
    for n in range(turns):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": f'{{"n": {n}}}'}}
        history.append({"role": "assistant", "content": f"I look at {n}.", "tool_calls": [call]})
        history.append({"role": "tool", "tool_call_id": f"c{n}", "content": f"straw {n}" if n != 3 else "a needle!"})
    return history


def test_the_five_tools_are_offered_in_openai_format():
    """E10"""
    context = ContextTools()
    names = [tool["function"]["name"] for tool in context.tools]
    assert names == ["check_context", "manage_context", "search_history", "search_tool_output", "view_tool_output"]
    assert all(
        tool["type"] == "function" and tool["function"]["parameters"]["type"] == "object" for tool in context.tools
    )
    assert context.owns("check_context") and not context.owns("look")


async def test_check_context_counts():
    """E10"""
    text, history = await ContextTools(max_tokens=8000).use("check_context", {}, chat(4))
    assert text.startswith("10 messages in 4 turns, ") and "of 8000 tokens" in text and "0 messages taken out" in text
    assert history == chat(4)


async def test_manage_context_keeps_the_prompt_and_whole_recent_turns():
    """E10"""
    context = ContextTools()
    text, history = await context.use("manage_context", {"keep_recent_turns": 2}, chat(6))
    assert history == [*chat(0), *chat(6)[-4:]], "no tool result is left without its call"
    assert text.startswith("8 messages were taken out, 6 stay")
    again, same = await context.use("manage_context", {"keep_recent_turns": 5}, history)
    assert same == history and again.startswith("0 messages")
    for wrong in (None, 0, "all"):
        told, kept = await context.use("manage_context", {"keep_recent_turns": wrong}, history)
        assert told.startswith("error: keep_recent_turns") and kept == history


async def test_search_history_finds_also_what_was_taken_out():
    """E10: 10 hits, 200-character snippets"""
    context = ContextTools()
    _, history = await context.use("manage_context", {"keep_recent_turns": 1}, chat(6))
    assert "needle!" not in str(history)
    text, _ = await context.use("search_history", {"pattern": r"needle\W"}, history)
    assert "tool: a needle!" in text and "user: Find the needle." in text
    long = [{"role": "user", "content": "x" * 5000 + "NEEDLE" + "y" * 5000}]
    text, _ = await ContextTools().use("search_history", {"pattern": "needle"}, long)
    assert "NEEDLE" in text and len(text) < 260
    text, _ = await ContextTools().use("search_history", {"pattern": "look"}, chat(30))
    assert text.count("assistant:") == 10 and text.endswith("(the first 10)")
    assert (await context.use("search_history", {"pattern": "zebra"}, history))[0] == "nothing matches 'zebra'"


async def test_long_outputs_are_shortened_searched_and_paged():
    """E10"""
    context = ContextTools(max_output_chars=100)
    assert context.shorten("short") == "short"
    whole = "\n".join(f"line {n}" for n in range(1, 201))
    shown = context.shorten(whole)
    assert shown.startswith(whole[:100]) and "output 1 goes on" in shown and "200 lines" in shown
    text, _ = await context.use("view_tool_output", {"page": 2}, [])
    assert text.splitlines()[0] == "page 2 of 4, lines 51 to 100" and text.splitlines()[1] == "line 51"
    text, _ = await context.use("view_tool_output", {"page": 1, "page_size": 3}, [])
    assert text.splitlines()[1:] == ["line 1", "line 2", "line 3"]
    assert (await context.use("view_tool_output", {"page": 9}, []))[0] == "error: there are 4 pages of 50 lines"
    text, _ = await context.use("search_tool_output", {"pattern": "line 1.$"}, [])
    assert text.splitlines() == [f"{n}: line {n}" for n in range(10, 20)]
    text, _ = await context.use("search_tool_output", {"pattern": "line"}, [])
    assert len(text.splitlines()) == 21 and text.endswith("(the first 20)")
    context.shorten("z" * 200)
    assert "zzz" in (await context.use("search_tool_output", {"pattern": "z+"}, []))[0]
    assert "line 7" in (await context.use("search_tool_output", {"pattern": "line 7$", "output": 1}, []))[0]
    context.reset()
    assert (await context.use("view_tool_output", {}, []))[0].startswith("error: there is no shortened output")


@pytest.mark.adversarial
async def test_a_pattern_that_never_ends_costs_its_deadline_and_nothing_else():
    """E10"""
    history = [{"role": "user", "content": "a" * 60 + "!"}]
    text, kept = await ContextTools().use("search_history", {"pattern": "(a+)+$"}, history)
    assert text == "error: this pattern takes too long: use a simpler one" and kept == history
    assert (await ContextTools().use("search_history", {"pattern": "("}, history))[
        0
    ] == "error: this is no regular expression"
    assert (await ContextTools().use("make_coffee", {}, history))[0].startswith("error: there is no context tool")


def test_every_kind_of_message_has_a_text():
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    assert text_of({"role": "user", "content": parts}) == "see\n[image_url]"
    assert text_of({"role": "assistant", "content": None}) == ""


async def test_the_same_tools_are_offered_over_mcp():
    """E10"""
    context, held = ContextTools(max_output_chars=10), Chat(messages=chat(6))
    context.shorten("a long output\nof two lines")
    toolset = Toolset(context.mcp_tools(held))
    async with serve_app(toolset) as url, RemoteTools(url + "/mcp", timeout_s=30) as tools:
        assert [one.name for one in await tools.list()] == [one["function"]["name"] for one in context.tools]
        assert (await tools.call("check_context", {})).startswith("14 messages in 6 turns")
        assert "8 stay" in await tools.call("manage_context", {"keep_recent_turns": 3})
        assert len(held.messages) == 8
        assert "needle!" in await tools.call("search_history", {"pattern": "needle!"})
        assert "2: of two lines" in await tools.call("search_tool_output", {"pattern": "two"})
        assert "page 1 of 1" in await tools.call("view_tool_output", {})
        assert (await tools.ask("manage_context", {"keep_recent_turns": 0})).is_error
    await toolset.aclose()
