"""Rows that share a prefix, trained as a tree: the same loss and gradients as flat rows, from fewer tokens."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("torch", reason="torch is not installed (make torch)")

import torch

from examples.grpo.learn import Learner, token_logprobs, tree_logprobs
from rollyard.core.call import Call, Reply, Sampling, floats, ids
from rollyard.core.message import Message, Text
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.train.tiny import TinyConfig, TinyModel
from rollyard.train.tree import group_by_tree, pack_tree
from rollyard.trajectory.samples import samples
from rollyard.trajectory.trajectory import Trajectory

SMALL = TinyConfig(width=32, layers=2, heads=4, vocabulary=50)


def rows_of(name: str, reward: float):
    """A conversation that was forked at its second turn, forked again, and one that began anew."""
    draw = torch.Generator().manual_seed(len(name) + int(reward))
    trajectory = Trajectory(name)

    def sampled(size):
        return torch.randint(1, 50, (size,), generator=draw).tolist()

    def turn(number, messages, prompt):
        said, completion = Message("assistant", (Text(f"answer {number}"),)), sampled(5)
        call = Call(id=f"{name}{number}", rollout_id=name, dialect="chat", model="m", messages=tuple(messages))
        reply = Reply(
            message=said,
            prompt_ids=ids(prompt),
            completion_ids=ids(completion),
            logprobs=floats([-2.0 - 0.1 * n for n in range(5)]),
            capture="tokens",
            sampling=Sampling(temperature=1.0),
        )
        trajectory.add(call, reply)
        return [*messages, said], [*prompt, *completion]

    def user(text):
        return Message("user", (Text(text),))

    first = turn(1, [user("go")], sampled(20))
    second = turn(2, [*first[0], user("left")], [*first[1], *sampled(4)])
    turn(3, [*first[0], user("right")], [*first[1], *sampled(6)])
    turn(4, [*second[0], user("on")], [*second[1], *sampled(3)])
    turn(5, [*second[0], user("off")], [*second[1], *sampled(3)])
    turn(6, [user("other")], sampled(9))
    rollout = Rollout(
        id=name, task=Task(id="t", instruction="x"), trajectory=trajectory, group_id="g", verdict=Verdict(reward=reward)
    )
    return samples(rollout).rows


def gradients(learner, rows):
    loss = learner.loss(rows)
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in learner.model.named_parameters()}
    learner.model.zero_grad()
    return float(loss.detach()), found


def test_a_tree_trains_as_its_flat_rows_do():
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    flat, tree = Learner(model), Learner(model, tree=True)
    with torch.no_grad():  # away from the reference, so that every part of the loss counts
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    rows = [*rows_of("one", 1.0), *rows_of("two", 0.0)]
    loss, grads = gradients(flat, rows)
    tree_loss, tree_grads = gradients(tree, rows)
    assert abs(loss - tree_loss) < 1e-5 and loss != 0.0
    assert max(float((grads[name] - tree_grads[name]).abs().max()) for name in grads) < 1e-5
    assert max(float(grad.abs().max()) for grad in grads.values()) > 1e-3
    sizes = [len(pack_tree(rows_of(name, reward)).ids) for name, reward in (("one", 1.0), ("two", 0.0))]
    assert sum(sizes) < 0.7 * sum(len(row.ids) for row in rows)


def family():
    """Rows of a rollout, of two that branch off it, and of one more whose parent is not among them."""
    parent = rows_of("one", 1.0)
    at = parent[0].spans[2].end  # the second answer of its first row begins there
    rows = [*parent]
    for name, reward in (("childa", 0.0), ("childbb", 1.0)):
        own = rows_of(name, reward)[0]
        mixed = msgspec.structs.replace(own, ids=parent[0].ids[:at] + own.ids[at:], own_from=at, count=1)
        rows.append(msgspec.structs.replace(mixed, parent_rollout="one", parent_call="one2"))
    return rows, at


def test_rollouts_that_branch_off_each_other_are_one_tree():
    rows, at = family()
    (group,) = group_by_tree(rows)
    tree = pack_tree(group)
    for row, path in zip(group, tree.paths, strict=True):
        assert tree.ids[path].tolist() == list(row.ids)
    flat = len(pack_tree(rows[:-2]).ids)
    assert len(tree.ids) == flat + sum(len(row.ids) - at for row in rows[-2:])
    siblings = pack_tree(rows[-2:])  # their parent is not there: they share the beginning with each other
    assert len(siblings.ids) == at + sum(len(row.ids) - at for row in rows[-2:])
    assert len(group_by_tree([*rows, *rows_of("two", 0.0)])) == 2
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    with torch.no_grad():
        alone = token_logprobs(model, torch.tensor([list(rows[-1].ids)]))[0]
        assert float((tree_logprobs(model, rows)[-1, : len(alone)] - alone).abs().max()) < 1e-5


def test_a_token_of_the_tree_sees_its_own_row_alone():
    tree = pack_tree(rows_of("one", 1.0))
    for path in tree.paths:
        for at, token in enumerate(path.tolist()):
            assert tree.sees[token].nonzero().flatten().tolist() == sorted(path[: at + 1].tolist())
            assert int(tree.places[token]) == at


def test_rows_say_which_row_they_share_their_beginning_with():
    rows = rows_of("one", 1.0)
    assert sorted((row.parent, row.shared) for row in rows if row.parent is not None)
    for row in rows:
        if row.parent is not None:
            above = rows[row.parent]
            assert above.index < row.index and row.ids[: row.shared] == above.ids[: row.shared]
            assert row.shared < len(row.ids)
    assert [row.parent for row in rows].count(None) == 2, "two roots"
    lone = msgspec.structs.replace(rows[-1], parent=None, shared=0)
    assert len(pack_tree([lone]).ids) == len(lone.ids)
