"""Rows for trainers: what becomes one, what does not and why, and that each answer trains once."""

import pytest

from rollyard.core.call import REPLAYED, Call, Reply, Sampling, Usage, floats, ids
from rollyard.core.message import Message, Text
from rollyard.core.node import Node
from rollyard.core.rollout import Failure, Rollout, Verdict
from rollyard.core.task import Task
from rollyard.trajectory.branch import can_train
from rollyard.trajectory.laws import counts, findings
from rollyard.trajectory.samples import advantages, samples
from rollyard.trajectory.trajectory import Trajectory

USER = Message("user", (Text("go"),))


def said(text):
    return Message("assistant", (Text(text),))


def call(id, *messages, **fields):
    return Call(id=id, rollout_id="r1", dialect="chat", model="m", messages=messages, **fields)


def reply(text, prompt, completion, **fields):
    base = {"capture": "tokens", "version_start": 3, "version_end": 3, "sampling": Sampling(temperature=0.7)}
    return Reply(
        message=said(text),
        prompt_ids=ids(prompt),
        completion_ids=ids(completion),
        logprobs=floats([-0.5] * len(completion)),
        **{**base, **fields},
    )


def rollout(trajectory, **fields):
    base = {"verdict": Verdict(reward=1.0), "run_id": "run1", "group_id": "g", "attempt": 2}
    return Rollout(id="r1", task=Task(id="t", instruction="x"), trajectory=trajectory, **{**base, **fields})


def two_turns():
    t = Trajectory("r1")
    t.add(call("c1", USER), reply("a", [1, 2], [3]))
    t.add(call("c2", USER, said("a"), USER), reply("b", [1, 2, 3, 4], [5, 6], finish="length"))
    return t


def test_a_straight_rollout_is_one_row():
    made = samples(rollout(two_turns()))
    assert made.refused == ()
    (row,) = made.rows
    assert list(row.ids) == [1, 2, 3, 4, 5, 6]
    assert list(row.mask) == [0, 0, 1, 0, 1, 1]
    assert list(row.logprobs) == [0, 0, -0.5, 0, -0.5, -0.5]
    assert list(row.versions) == [-1, -1, 3, -1, 3, 3]
    assert list(row.temperatures) == [1, 1, 0.7, 1, 0.7, 0.7]
    assert [span.role for span in row.spans] == ["user", "assistant", "user", "assistant"]
    assert (row.prompt_len, row.truncated, row.reward, row.index, row.count) == (2, True, 1.0, 0, 1)
    assert (row.task_id, row.attempt, row.group_id, row.call_ids) == ("t", 2, "g", ("c1", "c2"))


def test_only_what_comes_from_the_parent_is_the_parents():
    """A child's answer at the branch point begins where the parent's tokens end; a row that began anew has none of them."""
    t = Trajectory("r1")
    t.add(call("c1", USER), reply("a", [1, 2], [3], trainable=False, flaws=(REPLAYED,)))
    t.add(call("c2", USER, said("a"), USER), reply("b", [1, 2, 3, 4], [5, 6]))
    t.add(call("c3", Message("user", (Text("what was done so far"),))), reply("c", [7, 8, 9], [5]))
    t.add(call("c4", USER, said("a"), USER, USER), reply("d", [1, 2, 3, 4, 4], [6], trainable=True))
    rows = samples(rollout(t, parent_rollout="r0", parent_call="x")).rows
    assert {row.call_ids: row.own_from for row in rows} == {("c1", "c2"): 4, ("c3",): 0, ("c1", "c4"): 3}
    assert {row.own_from for row in samples(rollout(t)).rows} == {0}


def test_an_unknown_temperature_is_not_made_up():
    t = Trajectory("r1")
    t.add(call("c1", USER), reply("a", [1], [2], sampling=None))
    assert samples(rollout(t)).rows[0].temperatures is None
    t = Trajectory("r1")
    t.add(call("c1", USER, sampling=Sampling(temperature=0.5)), reply("a", [1], [2], sampling=None))
    assert list(samples(rollout(t)).rows[0].temperatures) == [1.0, 0.5]


def test_a_shared_answer_trains_in_a_row_that_is_kept():
    """The first branch to hold it is auxiliary and not asked for, so it trains in the second."""
    t = Trajectory("r1")
    t.add(call("c1", USER), reply("a", [1, 2], [3]))
    t.add(call("c2", USER, said("a"), said("x"), USER, kind="auxiliary"), reply("t", [1, 2, 3, 9], [9]))
    t.add(call("c3", USER, said("a"), USER), reply("b", [1, 2, 3, 4], [5]))
    assert [b.kind for b in t.branches] == ["auxiliary", "agent"]
    made = samples(rollout(t))
    (row,) = made.rows
    assert list(row.mask) == [0, 0, 1, 0, 1]
    assert made.refused[0].reasons == ("auxiliary branches are not asked for",)


def test_rows_of_a_fork_share_no_trained_token():
    t = two_turns()
    t.add(call("c3", USER, said("a"), Message("user", (Text("other"),))), reply("c", [1, 2, 3, 8], [9]))
    made = samples(rollout(t))
    assert [list(row.mask) for row in made.rows] == [[0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert [(row.index, row.count) for row in made.rows] == [(0, 2), (1, 2)]


def test_what_cannot_be_proved_is_refused_with_its_reason():
    t = Trajectory("r1")
    t.add(call("c1", USER), Reply(message=said("a")))
    assert samples(rollout(t)).refused[0].reasons == (
        "token ids are known for 0 of 2 messages",
        "call c1: the policy gave no logprobs",
    )
    t = Trajectory("r1")
    t.add(call("c1", USER), reply("a", [1], [2], trainable=False, flaws=("stopped by the budget",)))
    assert samples(rollout(t)).refused[0].reasons == ("call c1: stopped by the budget",)


def test_an_answer_trains_only_with_one_logprob_for_each_of_its_tokens():
    """A stored node is trusted for nothing: its counts are compared again."""
    for logprobs, trains in ((floats([-0.5, -0.5]), True), (floats([-0.5]), False), (None, False)):
        node = Node(id=1, parent=0, message=said("a"), sampled=True, ids=ids([1, 2]), logprobs=logprobs)
        assert can_train(node) == trains


def test_a_rollout_without_reward_or_that_failed_gives_no_rows():
    failure = Failure(
        boundary="sandbox", cause="SandboxGone", message="x", stage="wait", retry=True, grade=False, trainable=False
    )
    made = samples(rollout(two_turns(), verdict=None, failure=failure))
    assert made.rows == ()
    assert made.refused[0].reasons == ("the rollout failed at its sandbox (SandboxGone)", "the rollout has no reward")
    assert samples(rollout(two_turns(), verdict=None)).rows == ()
    (row,) = samples(rollout(two_turns(), verdict=None), unscored=True).rows
    assert row.reward is None


def test_black_box_rollouts_have_no_samples():
    assert samples(rollout(None)).rows == ()
    assert samples(rollout(Trajectory("r1"))) == samples(rollout(None))


def test_a_rollout_with_many_rows_counts_once_in_its_group():
    from msgspec.structs import replace

    t = two_turns()
    t.add(call("c3", USER, said("a"), Message("user", (Text("other"),))), reply("c", [1, 2, 3, 8], [9]))
    many = samples(rollout(t, verdict=Verdict(reward=1.0))).rows
    (one,) = samples(rollout(two_turns(), verdict=Verdict(reward=0.0))).rows
    one = replace(one, rollout_id="r2")
    assert len(many) == 2
    assert advantages([*many, one], scale=False) == {"r1": 0.5, "r2": -0.5}
    assert advantages([*many, one]) == {"r1": 1.0, "r2": -1.0}
    unscored = replace(one, rollout_id="r3", reward=None)
    assert advantages([*many, one, unscored], scale=False) == {"r1": 0.5, "r2": -0.5}
    assert advantages(many) == {"r1": 0.0}


def test_an_honest_trajectory_breaks_no_law():
    t = two_turns()
    assert findings(t) == []
    seen = counts(t)
    assert (seen.calls, seen.branches, seen.trained_tokens, seen.tokens) == (2, 1, 3, 6)
    assert seen.edges == {"root": 1, "extends": 1} and seen.captures == {"tokens": 2}


@pytest.mark.parametrize(
    ("change", "law"),
    [
        ({"ids": ids([7, -1])}, "token ids are not negative"),
        ({"logprobs": floats([-1.0])}, "one logprob per sampled token"),
        ({"logprobs": floats([float("inf"), -1.0])}, "logprobs are finite"),
        ({"logprobs": floats([2.0, -1.0])}, "logprobs are logprobs"),
        ({"inserted": ((0, 1),)}, "inserted tokens are context"),
        ({"call_id": "c1"}, "a call leads to its answer"),
    ],
)
def test_a_tampered_answer_breaks_a_law(change, law):
    from msgspec.structs import replace

    t = two_turns()
    nodes = [replace(node, **change) if node.id == 3 else node for node in t.nodes]
    assert law in {found.law for found in findings(Trajectory.restore("r1", t.records, nodes))}


def test_usage_that_disagrees_with_the_recorded_tokens_is_a_finding():
    t = Trajectory("r1")
    t.add(call("c1", USER), reply("a", [1, 2], [3], usage=Usage(prompt_tokens=3, completion_tokens=1)))
    assert [found.law for found in findings(t)] == ["usage counts the prompt"]
