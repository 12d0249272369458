import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollyard as ry
from rollyard.core.call import Reply, floats, ids
from rollyard.core.errors import ConfigError
from rollyard.core.message import Message, Text, Thinking, ToolCall, ToolResult, tools_digest
from rollyard.policy.prompts import Prompts
from rollyard.policy.renderers.bytelevel import END, ByteRenderer
from rollyard.trajectory.laws import counts, findings
from rollyard.trajectory.trajectory import Trajectory

from .conftest import BASH, matched, plain_call, user

BYTES = ByteRenderer()


class Rollout:
    """A rollout against `Prompts` and a real trajectory, as the gate plays it: matched, prepared, answered, added."""

    def __init__(self, renderer=BYTES, trajectory=None, **options):
        self.prompts = Prompts(renderer, **options)
        self.renderer = renderer
        self.trajectory = trajectory or Trajectory("r1")

    def turn(self, messages, completion, tools=(BASH,), **fields):
        call = plain_call(*messages, tools=tools, **fields)
        call = msgspec.structs.replace(call, tools_digest=tools_digest(call.tools))
        call = matched(self.trajectory, call)
        prepared = self.prompts.prepare(call)
        message = completion if isinstance(completion, Message) else self.renderer.parse(completion)
        sampled = self.renderer.completion_of(message) if isinstance(completion, Message) else completion
        reply = Reply(
            message=message,
            prompt_ids=prepared.prompt_ids,
            completion_ids=sampled,
            logprobs=floats([-0.1] * len(sampled)),
            inserted=prepared.inserted,
            prompt_source=prepared.prompt_source,
            break_reason=prepared.break_reason,
        )
        self.record = self.trajectory.add(call, reply).record
        return prepared, reply


def called(*commands, text="", thinking=""):
    parts = [Thinking(thinking)] if thinking else []
    parts += [Text(text)] if text else []
    parts += [ToolCall(f"c{n}_{hash(c) % 997}", "bash", json.dumps({"command": c})) for n, c in enumerate(commands)]
    return Message("assistant", tuple(parts))


def results(message, text="ok"):
    return [Message("tool", (ToolResult(c.id, (Text(text),)),)) for c in message.tool_calls]


def rewritten(message):
    """What agents do to an answer: arguments re-serialised, reasoning dropped, trailing white space trimmed."""
    parts = []
    for part in message.parts:
        if isinstance(part, ToolCall):
            part = msgspec.structs.replace(part, arguments=json.dumps(json.loads(part.arguments), indent=1))
        if isinstance(part, Text):
            part = Text(part.text.rstrip())
        if not isinstance(part, Thinking):
            parts.append(part)
    return Message("assistant", tuple(parts))


def test_a_turn_begins_with_every_id_of_the_turn_before_though_the_echo_was_rewritten():
    rollout = Rollout()
    messages, before = [user("go")], None
    for n in range(5):
        answer = called(f"ls {n}", text="  odd   white space \n\n", thinking="hm")
        call, reply = rollout.turn(messages, answer)
        if before is not None:
            assert call.prompt_source == "bridge" and call.prompt_ids[: len(before)] == before
        before = call.prompt_ids + reply.completion_ids
        messages += [rewritten(answer), *results(answer)]
    assert rollout.prompts.counts == {"render:new_root": 1, "bridge": 4}
    (branch,) = rollout.trajectory.branches
    assert branch.ids == before


def test_split_parallel_calls_are_bridged_as_the_one_answer_they_were():
    rollout = Rollout()
    answer = called("a", "b", text="both")
    first, second = answer.tool_calls
    one, two = results(answer)
    call, reply = rollout.turn([user("go")], answer)
    split = [Message("assistant", (Text("both"), first)), one, Message("assistant", (second,)), two]
    after, _ = rollout.turn([user("go"), *split], called("c"))
    whole = call.prompt_ids + reply.completion_ids
    assert after.prompt_source == "bridge" and after.prompt_ids[: len(whole)] == whole
    assert BYTES.decode(after.prompt_ids[len(whole) :]) == "<tool>ok<end><tool>ok<end><assistant>"


def edited_rollout(turns, **options):
    """An agent that sends `cd /app && X` back as `X`, as Claude Code does where it is in /app already."""
    rollout = Rollout(**options)
    messages, before = [user("go")], None
    for n in range(turns):
        answer = called(f"cd /app && make {n}", text=f"step {n}")
        call, reply = rollout.turn(messages, answer)
        if options.get("history") != "strict" and before is not None:
            assert call.prompt_source == "bridged_by_id" and call.prompt_ids[: len(before)] == before
        before = call.prompt_ids + reply.completion_ids
        shown = tuple(
            msgspec.structs.replace(part, arguments=part.arguments.replace("cd /app && ", ""))
            if isinstance(part, ToolCall)
            else part
            for part in answer.parts
        )
        messages += [Message("assistant", shown), *results(answer)]
    return rollout


def test_commands_that_an_agent_edits_stay_as_they_were_sampled():
    rollout = edited_rollout(8)
    assert rollout.prompts.counts == {"render:new_root": 1, "bridged_by_id": 7}
    (branch,) = rollout.trajectory.branches
    assert BYTES.decode(branch.ids).count("cd /app") == 8
    assert [record.prompt_source for record in rollout.trajectory.records] == ["render"] + ["bridged_by_id"] * 7
    assert counts(rollout.trajectory).prompts == {"render": 1, "bridged_by_id": 7}
    assert not findings(rollout.trajectory)


def test_a_strict_history_starts_a_branch_where_an_agent_edits_a_command():
    rollout = edited_rollout(3, history="strict")
    assert rollout.prompts.counts == {"render:new_root": 1, "render:assistant_rewritten": 2}
    assert len(rollout.trajectory.branches) == 3 and not findings(rollout.trajectory)
    with pytest.raises(ConfigError, match="keep or strict"):
        Prompts(BYTES, history="loose")
    with pytest.raises(ConfigError, match="needs a renderer"):
        ry.policy.Queue(history="strict")


def test_a_cut_turn_is_closed_with_a_token_that_carries_no_loss():
    rollout = Rollout()
    call, reply = rollout.turn([user("go")], ids([*b"half a sent"]))
    after, _ = rollout.turn([user("go"), reply.message, user("go on")], called("x"))
    end = len(call.prompt_ids) + len(reply.completion_ids)
    assert after.inserted == ((end, end + 1),) and after.prompt_ids[end] == END
    (branch,) = rollout.trajectory.branches
    assert branch.mask[end - 1] == 1 and branch.mask[end] == 0


def test_two_continuations_of_one_turn_do_not_disturb_each_other():
    rollout = Rollout()
    answer = called("a")
    call, reply = rollout.turn([user("go")], answer)
    whole = call.prompt_ids + reply.completion_ids
    history = [user("go"), answer, *results(answer)]
    for side in ("left", "right"):
        one, answered = rollout.turn([*history, user(side)], called(side))
        assert one.prompt_ids[: len(whole)] == whole and one.prompt_source == "bridge"
        further = [*history, user(side), answered.message, *results(answered.message)]
        two, _ = rollout.turn(further, called(f"{side} again"))
        so_far = one.prompt_ids + answered.completion_ids
        assert two.prompt_ids[: len(so_far)] == so_far and two.prompt_source == "bridge"
    assert len(rollout.trajectory.branches) == 2


def test_every_fall_back_to_a_full_render_says_why():
    answer = called("a")
    other = called("z")

    def reason(second, tools=(BASH,), **fields):
        rollout = Rollout()
        rollout.turn([Message("system", (Text("be good"),)), user("go")], answer)
        call, _ = rollout.turn(second, called("b"), tools=tools, **fields)
        assert call.prompt_source == "render"
        assert rollout.record.prompt_source == "render"
        return call.break_reason

    system, tail = Message("system", (Text("be good"),)), [answer, *results(answer)]
    assert reason([Message("system", (Text("be bad"),)), user("go"), *tail]) == "system_changed"
    assert reason([system, user("went"), *tail]) == "history_edited"
    assert reason([system, user("go"), other, *results(other)]) == "assistant_rewritten"
    assert reason([system, user("go"), *tail], tools=()) == "tools_changed"
    assert reason([system, user("summary")], kind="compaction") == "compaction"


def test_after_a_restart_prompts_go_on_from_the_recorded_ids():
    rollout = Rollout()
    messages, before = [user("go")], None
    for n in range(3):
        answer = called(f"ls {n}")
        call, reply = rollout.turn(messages, answer)
        before = call.prompt_ids + reply.completion_ids
        messages += [answer, *results(answer)]
    again = Rollout(trajectory=Trajectory.restore("r1", rollout.trajectory.records, rollout.trajectory.nodes))
    call, _ = again.turn(messages, called("next"))
    assert call.prompt_source == "bridge" and call.prompt_ids[: len(before)] == before


def test_of_two_equal_answers_the_one_whose_tool_calls_are_quoted_is_continued():
    rollout = Rollout()
    one = Message("assistant", (ToolCall("first", "bash", '{"command": "ls"}'),))
    two = Message("assistant", (ToolCall("second", "bash", '{"command":"ls"}'),))
    call, reply = rollout.turn([user("go")], one)
    rollout.turn([user("go")], two)
    after, _ = rollout.turn([user("go"), one, *results(one)], called("next"))
    whole = call.prompt_ids + reply.completion_ids
    assert after.prompt_ids[: len(whole)] == whole


def test_memory_grows_with_new_tokens_not_with_turns_times_history():
    rollout = Rollout()
    messages = [user("x" * 20_000)]
    for n in range(30):
        answer = called(f"ls {n}")
        rollout.turn(messages, answer)
        messages += [answer, *results(answer)]
    held = {id(node.ids): len(node.ids) for node in rollout.trajectory.nodes}
    assert sum(held.values()) < 30_000
    parent = rollout.trajectory.match(
        plain_call(*messages, tools=(BASH,), tools_digest=tools_digest((BASH,)))
    ).continues
    assert {id(delta) for delta in parent.deltas} <= set(held)


texts = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(texts, st.lists(texts, max_size=3), texts, st.booleans()), min_size=1, max_size=5))
def test_the_concatenation_law_holds_for_random_conversations(turns):
    """Whatever is said, cut or sent: each prompt is the ids before, unchanged, then new ones; and the graph agrees."""
    rollout = Rollout(check="always")
    messages, before = [user("go")], None
    for n, (text, commands, tool_text, cut) in enumerate(turns):
        answer = called(*(f"{n}{c}" for c in commands), text=text)
        sampled = BYTES.completion_of(answer)[: -1 if cut else None]
        call = plain_call(*messages, tools=(BASH,))
        call = msgspec.structs.replace(call, tools_digest=tools_digest(call.tools))
        call = matched(rollout.trajectory, call)
        prepared = rollout.prompts.prepare(call)
        reply = Reply(
            message=answer,
            prompt_ids=prepared.prompt_ids,
            completion_ids=sampled,
            logprobs=floats([0.0] * len(sampled)),
            inserted=prepared.inserted,
        )
        rollout.trajectory.add(call, reply)
        if before is not None:
            assert prepared.prompt_source == "bridge" and prepared.prompt_ids[: len(before)] == before
        before = prepared.prompt_ids + sampled
        messages += [rewritten(answer), *results(answer, tool_text)] if commands else [answer, user(tool_text)]
