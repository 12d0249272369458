import msgspec
import pytest

from rollyard.core.branch_point import BranchPoint
from rollyard.core.errors import ConfigError, PolicyError
from rollyard.core.message import Message, Text, ToolResult, tools_digest
from rollyard.policy.prefix import open_prefix
from rollyard.policy.replay_policy import replay
from rollyard.policy.scripted_policy import scripted
from rollyard.trajectory.trajectory import Trajectory

from .conftest import BASH, plain_call, user

pytestmark = pytest.mark.anyio


async def agent(policy, *, rollout_id="r1", prompt="go", trajectory=None):
    """A small agent: runs every tool call, stops at text. Returns what it was told."""
    messages, said = (user(prompt),), []
    while not said or said[-1].tool_calls:
        call = plain_call(*messages, tools=(BASH,), rollout_id=rollout_id)
        call = msgspec.structs.replace(call, tools_digest=tools_digest(call.tools))
        reply = await policy(call)
        if trajectory is not None:
            trajectory.add(call, reply)
        said.append(reply.message)
        results = (Message("tool", (ToolResult(c.id, (Text("ok"),)),)) for c in reply.message.tool_calls)
        messages = (*messages, reply.message, *results)
    return said


async def recorded():
    trajectory = Trajectory("r1")
    said = await agent(scripted([{"shell": "ls"}, {"shell": "pwd"}, {"text": "bye"}]), trajectory=trajectory)
    return trajectory, said


async def test_a_recorded_rollout_is_answered_again_word_for_word():
    trajectory, said = await recorded()
    policy = replay(trajectory)
    assert await agent(policy, rollout_id="r2") == said and policy.mismatches == []
    assert await agent(policy, rollout_id="r3") == said


async def test_replayed_tokens_are_the_recorded_ones_and_never_train_again():
    trajectory, _ = await recorded()
    first = trajectory.records[0]
    call = msgspec.structs.replace(plain_call(user("go"), tools=(BASH,)), tools_digest=first.tools_digest)
    reply = await replay(trajectory)(call)
    assert reply.prompt_ids == trajectory.prompt_ids(first.id)
    assert reply.completion_ids == trajectory.answer(first.id).ids and not reply.trainable


async def test_a_call_that_is_not_in_the_recording_is_refused_with_a_diff():
    trajectory, _ = await recorded()
    policy = replay(trajectory)
    with pytest.raises(PolicyError, match=r"(?s)-go.*\+went"):
        await agent(policy, prompt="went")
    assert "+went" in policy.mismatches[0].diff


async def test_without_strictness_a_differing_call_is_answered_by_its_place_and_reported():
    trajectory, said = await recorded()
    policy = replay(trajectory, strict=False)
    assert await agent(policy, prompt="went") == said
    assert len(policy.mismatches) == 3 and all("+went" in m.diff for m in policy.mismatches)


async def test_a_recording_without_answers_is_refused():
    with pytest.raises(ConfigError):
        replay(Trajectory("empty"))


async def test_a_call_that_offers_no_tools_is_found_again():
    """A title, a summary: by a replay, and at the beginning of a branch."""
    trajectory, asked = Trajectory("r1"), plain_call(user("sum up"))
    trajectory.add(asked, await scripted([{"text": "short"}])(asked))
    later = plain_call(user("sum up"), rollout_id="r2")
    assert (await replay(trajectory)(later)).message.text == "short"
    prefix = open_prefix(trajectory, BranchPoint("r1", "end"), {})
    assert prefix.take(later)[1].message.text == "short" and prefix.diverged is None


async def test_equal_requests_get_their_recorded_answers_in_order():
    said = iter(["one", "two"])
    policy, trajectory = scripted(lambda call: next(said)), Trajectory("r1")
    for _ in range(2):
        call = plain_call(user("again"))
        trajectory.add(call, await policy(call))
    again = replay(trajectory)
    answers = [(await again(plain_call(user("again")))).message.text for _ in range(3)]
    assert answers == ["one", "two", "two"]
