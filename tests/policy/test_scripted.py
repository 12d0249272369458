import json

import msgspec
import pytest

from rollyard.core.call import floats
from rollyard.core.errors import ConfigError, PolicyError, UpstreamError
from rollyard.core.message import Message, Text, ToolResult, ToolSpec
from rollyard.policy.renderers.bytelevel import ByteRenderer
from rollyard.policy.scripted_policy import scripted
from rollyard.trajectory.trajectory import Trajectory

from .conftest import BASH, matched, plain_call, user

pytestmark = pytest.mark.anyio


def tool(name, properties=None, required=(), namespace=None):
    schema = {"type": "object", "properties": properties or {"command": {"type": "string"}}, "required": list(required)}
    return ToolSpec(name, "", json.dumps(schema), namespace=namespace)


def result(reply, text="ok"):
    return tuple(Message("tool", (ToolResult(c.id, (Text(text),)),)) for c in reply.message.tool_calls)


async def played(policy, *, turns, tools=(BASH,), rollout_id="r1", start=None):
    """An agent that answers every tool call with `ok`; returns the replies."""
    messages = start or (user("go"),)
    replies = []
    for _ in range(turns):
        reply = await policy(plain_call(*messages, tools=tools, rollout_id=rollout_id))
        replies.append(reply)
        messages = (
            (*messages, reply.message, *result(reply)) if reply.message.tool_calls else (*messages, reply.message)
        )
    return replies


async def test_a_file_of_steps_is_played_turn_by_turn(tmp_path):
    path = tmp_path / "script.yaml"
    path.write_text("- shell: echo hello > out.txt\n- write: {path: a/b.txt, text: 'x'}\n- text: all done\n")
    one, two, three, four = await played(scripted(path), turns=4)
    assert json.loads(one.message.tool_calls[0].arguments) == {"command": "echo hello > out.txt"}
    assert "a/b.txt" in two.message.tool_calls[0].arguments and one.finish == "tool_calls"
    assert three.message.text == "all done" and three.finish == "stop"
    assert four.message.text == "done"


@pytest.mark.parametrize(
    ("offered", "arguments"),
    [
        (tool("Bash", {"command": {"type": "string"}, "description": {"type": "string"}}), {"command": "ls"}),
        (tool("exec_command", {"cmd": {"type": "string"}}, ["cmd"]), {"cmd": "ls"}),
        (
            tool("shell", {"command": {"type": "array", "items": {"type": "string"}}}),
            {"command": ["bash", "-lc", "ls"]},
        ),
        (
            tool(
                "run_shell_command",
                {"command": {"type": "string"}, "is_background": {"type": "boolean"}},
                ["command", "is_background"],
            ),
            {"command": "ls", "is_background": False},
        ),
        (tool("developer__shell"), {"command": "ls"}),
        (tool("run_commands", {"commands": {"type": "array", "items": {"type": "string"}}}), {"commands": ["ls"]}),
        (
            tool(
                "terminal",
                {"command": {"type": "string"}, "security_risk": {"type": "string", "enum": ["LOW", "HIGH"]}},
                ["command", "security_risk"],
            ),
            {"command": "ls", "security_risk": "LOW"},
        ),
        (
            tool(
                "execute_bash",
                {"command": {"type": "string"}, "timeout": {"type": "integer", "minimum": 1}},
                ["command", "timeout"],
            ),
            {"command": "ls", "timeout": 1},
        ),
    ],
)
async def test_shell_finds_the_agents_own_shell_and_fills_what_it_requires(offered, arguments):
    others = (tool("read", {"path": {"type": "string"}}), offered, tool("search"))
    (reply,) = await played(scripted([{"shell": "ls"}]), turns=1, tools=others)
    (call,) = reply.message.tool_calls
    assert call.name == offered.name and json.loads(call.arguments) == arguments


async def test_a_namespaced_tool_keeps_its_namespace():
    (reply,) = await played(
        scripted([{"tool": "magic", "args": {"n": 1}}]), turns=1, tools=(tool("magic", namespace="mcp__triv"),)
    )
    assert reply.message.tool_calls[0].namespace == "mcp__triv"


async def test_write_without_a_shell_uses_the_agents_file_tool():
    writer = tool("Write", {"file_path": {"type": "string"}, "content": {"type": "string"}}, ["file_path", "content"])
    (reply,) = await played(scripted([{"write": {"path": "a.txt", "text": "x"}}]), turns=1, tools=(writer,))
    assert json.loads(reply.message.tool_calls[0].arguments) == {"file_path": "a.txt", "content": "x"}


async def test_an_agent_without_tools_gets_whole_files_as_text():
    script = [{"write": {"path": "a.txt", "text": "x"}}, {"shell": "echo hello > out.txt"}]
    one, two = await played(scripted(script), turns=2, tools=())
    assert one.message.text == "a.txt\n```\nx\n```" and two.message.text == "out.txt\n```\nhello\n```"


async def test_an_agent_that_ends_by_a_command_is_ended_by_it():
    prompt = user("When done run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    (reply,) = await played(scripted([{"text": "done"}]), turns=1, start=(prompt,))
    assert json.loads(reply.message.tool_calls[0].arguments) == {
        "command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    }


async def test_the_place_is_read_from_the_history_so_branches_and_retries_answer_alike():
    policy = scripted([{"shell": "one"}, {"shell": "two"}, {"text": "end"}])
    first = await policy(plain_call(tools=(BASH,)))
    again = await policy(plain_call(tools=(BASH,)))
    assert first.message.tool_calls[0].arguments == again.message.tool_calls[0].arguments
    history = (user("hello"), first.message, *result(first))
    left, right = [await policy(plain_call(*history, tools=(BASH,))) for _ in range(2)]
    assert "two" in left.message.tool_calls[0].arguments and "two" in right.message.tool_calls[0].arguments


async def test_split_parallel_calls_still_count_as_one_turn():
    policy = scripted([{"parallel": [{"shell": "a"}, {"shell": "b"}]}, {"text": "end"}])
    first = await policy(plain_call(tools=(BASH,)))
    a, b = first.message.tool_calls
    split = []
    for call in (a, b):
        split += [Message("assistant", (call,)), Message("tool", (ToolResult(call.id, (Text("ok"),)),))]
    reply = await policy(plain_call(user("hello"), *split, tools=(BASH,)))
    assert reply.message.text == "end"


async def test_side_calls_and_sub_agents_do_not_consume_the_script():
    policy = scripted({"steps": [{"shell": "main"}], "subagent": [{"shell": "sub"}]})
    title = await policy(plain_call(user("title?"), kind="auxiliary"))
    sub = await policy(plain_call(user("you are a sub-agent"), tools=(BASH,), kind="subagent"))
    main = await policy(plain_call(user("go"), tools=(BASH,)))
    assert title.message.text and not title.message.tool_calls
    assert "sub" in sub.message.tool_calls[0].arguments and "main" in main.message.tool_calls[0].arguments


async def test_a_compacted_history_goes_on_where_it_was():
    policy = scripted([{"shell": "one"}, {"shell": "two"}, {"text": "end"}])
    one, two = await played(policy, turns=2)
    history = (user("go"), one.message, *result(one), two.message, *result(two))
    summary = await policy(plain_call(*history, user("summarise"), kind="compaction"))
    reply = await policy(plain_call(user(f"Earlier: {summary.message.text}"), tools=(BASH,)))
    assert reply.message.text == "end"


async def test_an_error_step_fails_once_and_the_same_turn_then_succeeds():
    policy = scripted([{"error": 503, "times": 2}, {"shell": "ls"}])
    for _ in range(2):
        with pytest.raises(UpstreamError) as failed:
            await policy(plain_call(tools=(BASH,)))
        assert failed.value.status == 503
    assert (await policy(plain_call(tools=(BASH,)))).message.tool_calls


async def test_a_function_may_answer_and_thinking_goes_with_the_answer():
    async def answering(call):
        return {"thinking": "hm", "text": f"{len(call.messages)} messages"}

    reply = await scripted(answering)(plain_call())
    assert reply.message.thinking == "hm" and reply.message.text == "1 messages"


async def test_its_tokens_obey_the_prefix_law_whatever_the_agent_does_to_the_echo():
    """The ids of a turn begin with every id of the turn before, though the arguments came back re-serialised."""
    policy, renderer = scripted([{"tool": "bash", "args": {"command": "ls", "z": [1, 2]}}] * 4), ByteRenderer()
    messages, before, trajectory = (user("go"),), None, Trajectory("r1")
    for _ in range(4):
        request = matched(trajectory, plain_call(*messages, tools=(BASH,)))
        reply = await policy(request)
        trajectory.add(request, reply)
        if before is not None:
            assert reply.prompt_ids[: len(before)] == before and reply.prompt_source == "bridge"
        before = reply.prompt_ids + reply.completion_ids
        (call,) = reply.message.tool_calls
        spaced = msgspec.structs.replace(call, arguments=json.dumps(json.loads(call.arguments), indent=2))
        messages = (*messages, Message("assistant", (spaced,)), *result(reply))
        assert reply.logprobs == floats([0.0]) * len(reply.completion_ids) and reply.capture == "tokens"
        assert renderer.parse(reply.completion_ids).tool_calls[0].name == "bash"


@pytest.mark.parametrize(
    "script",
    [
        [{"shel": "ls"}],
        [{}],
        [7],
        {"stepz": []},
        [{"write": {"path": "x"}}],
        "missing-file.yaml",
        [{"parallel": [{"text": "x"}]}],
    ],
)
async def test_a_script_with_a_mistake_is_refused_before_it_runs(script):
    with pytest.raises(ConfigError):
        scripted(script)


async def test_a_tool_that_is_not_offered_names_those_that_are():
    with pytest.raises(PolicyError, match="bash"):
        await scripted([{"tool": "fly"}])(plain_call(tools=(BASH,)))
