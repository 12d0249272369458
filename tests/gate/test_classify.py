"""What a call is for, from what real agents send."""

from __future__ import annotations

import pytest

from rollyard.core.call import Call, Sampling
from rollyard.core.message import Message, Text, ToolSpec, tools_digest
from rollyard.gate.classify import Shape, label
from tests.gate.conftest import Answers, ask, open_gate

BASH = (ToolSpec("bash", "runs", "{}"),)
OTHER = (ToolSpec("search", "looks", "{}"), ToolSpec("finish", "ends", "{}"))


def call(*messages: tuple[str, str], tools=(), max_tokens=None) -> Call:
    return Call(
        id="c",
        rollout_id="r",
        dialect="chat",
        model="m",
        messages=tuple(Message(role, (Text(text),)) for role, text in messages),
        tools=tools,
        tools_digest=tools_digest(tools) if tools else b"",
        sampling=Sampling(max_tokens=max_tokens),
    )


def kind(made: Call, headers=None, shape=None) -> str:
    return label(made, headers or {}, shape or Shape()).kind


MAIN = (("system", "You are a coding agent."), ("user", "fix the bug"))


def seen() -> Shape:
    shape = Shape()
    label(call(*MAIN, tools=BASH), {}, shape)
    return shape


def test_the_first_call_with_tools_is_the_agent():
    assert kind(call(*MAIN, tools=BASH)) == "agent"
    assert kind(call(*MAIN, ("assistant", "ok"), ("user", "go on"), tools=BASH), shape=seen()) == "agent"


@pytest.mark.parametrize(
    ("headers", "expected", "thread", "parent"),
    [
        ({"x-session-id": "ses_1"}, "agent", "ses_1", None),
        ({"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}, "subagent", "ses_2", "ses_1"),
        ({"x-claude-code-session-id": "s"}, "agent", "s", None),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a7"}, "subagent", "a7", "s"),
        ({"thread-id": "t1", "session-id": "s"}, "agent", "t1", None),
        ({"thread-id": "t2", "session-id": "s", "x-codex-parent-thread-id": "t1"}, "subagent", "t2", "t1"),
        ({"thread-id": "t1", "x-codex-turn-metadata": '{"request_kind": "compaction"}'}, "compaction", "t1", None),
        ({"agent-session-id": "20261115_1"}, "agent", "20261115_1", None),
    ],
)
def test_headers_of_agents_that_say_so_are_believed(headers, expected, thread, parent):
    found = label(call(*MAIN, tools=BASH), headers, Shape())
    assert (found.kind, found.thread, found.parent_thread) == (expected, thread, parent)


def test_other_instructions_with_other_tools_are_a_subagent():
    assert kind(call(("system", "You search code."), ("user", "find x"), tools=OTHER), shape=seen()) == "subagent"
    assert kind(call(("system", "You are a coding agent, now v2."), *MAIN[1:], tools=BASH), shape=seen()) == "agent"


def test_titles_and_names_are_auxiliary_also_before_the_main_call():
    title = call(("system", "You are a title generator. Output only a thread title."), ("user", "fix the bug"))
    assert kind(title) == "auxiliary"
    assert kind(call(("user", "Reply with only a session name of at most four words for: fix the bug"))) == "auxiliary"
    assert (
        kind(
            call(
                ("user", "anything"),
            ),
            shape=seen(),
        )
        == "auxiliary"
    )


def test_a_probe_for_one_token_is_auxiliary():
    assert kind(call(("user", "quota"), max_tokens=1)) == "auxiliary"


def test_an_agent_that_never_offers_tools_is_an_agent():
    assert kind(call(("system", "Reply with one bash block."), ("user", "fix the bug"))) == "agent"
    assert kind(call(*MAIN, ("assistant", "ls"), ("user", "output: summary.txt"))) == "agent"


@pytest.mark.parametrize(
    ("words", "tools"),
    [
        ("Provide a detailed summary of the conversation above for a new session.", ()),
        ("Your task is to create a detailed summary. Do NOT call any tools, respond with text only.", BASH),
        ("You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary.", ()),
    ],
)
def test_a_request_for_a_summary_of_the_conversation_is_a_compaction(words, tools):
    made = call(*MAIN, ("assistant", "did things"), ("user", words), tools=tools)
    assert kind(made, shape=seen()) == "compaction"


def test_a_task_about_summaries_is_still_the_agent():
    assert kind(call(MAIN[0], ("user", "write a function that returns a summary"), tools=BASH)) == "agent"


@pytest.mark.anyio
async def test_kinds_and_threads_are_recorded_and_nothing_is_dropped():
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    title = [{"role": "system", "content": "You are a title generator."}, {"role": "user", "content": "fix"}]
    main = [{"role": "system", "content": "You are a coding agent."}, {"role": "user", "content": "fix"}]
    async with open_gate(Answers()) as gate:
        session = await gate.open_session("r1")
        for body, headers in (
            ({"model": "m", "messages": title}, {"x-session-id": "s1"}),
            ({"model": "m", "messages": main, "tools": tools}, {"x-session-id": "s1"}),
            ({"model": "m", "messages": main[1:], "tools": tools}, {"x-session-id": "s2", "x-parent-session-id": "s1"}),
        ):
            await ask(gate, "POST", "/v1/chat/completions", key=session.key, body=body, headers=headers)
        records = session.trajectory.records
        assert [(r.kind, r.thread, r.parent_thread) for r in records] == [
            ("auxiliary", "s1", None),
            ("agent", "s1", None),
            ("subagent", "s2", "s1"),
        ]
        assert "authorization" not in gate.policy.asked[0].headers
