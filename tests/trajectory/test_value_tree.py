"""What the branch points of a tree are worth, where they lie in its rows, and the credit of what lies between them."""

from __future__ import annotations

from array import array

import pytest

from rollyard.core.call import floats, ids
from rollyard.trajectory.branch import Span
from rollyard.trajectory.samples import Sample, advantages
from rollyard.trajectory.value_tree import TreeLeaf, ValueTree, node_advantages, tree_nodes


def leaf(name, reward, parent=None, call=None, place=0):
    return TreeLeaf(id=name, task_id="t", reward=reward, parent=parent, call=call, place=place)


def row(name, reward, *, parent=None, call=None, own_from=0, group="g"):
    """Three answers of four tokens, six tokens before each: they begin at 6, 16 and 26."""
    spans = []
    for number in range(3):
        spans.append(Span(2 * number, "user", 10 * number, 10 * number + 6))
        spans.append(
            Span(
                2 * number + 1, "assistant", 10 * number + 6, 10 * number + 10, sampled=True, call_id=f"{name}{number}"
            )
        )
    own = bytes(span.sampled and span.start >= own_from for span in spans for _ in range(span.end - span.start))
    return Sample(
        rollout_id=name,
        run_id="run",
        group_id=group,
        task_id="t",
        attempt=0,
        index=0,
        count=1,
        kind="agent",
        call_ids=tuple(f"{name}{number}" for number in range(3)),
        spans=tuple(spans),
        ids=ids(range(30)),
        mask=own,
        logprobs=floats([0.0]) * 30,
        versions=array("q", [0]) * 30,
        temperatures=None,
        prompt_len=6,
        truncated=False,
        reward=reward,
        parent_rollout=parent,
        parent_call=call,
        own_from=own_from,
    )


def test_what_branches_off_further_along_goes_through_an_earlier_branch_point_too():
    leaves = [leaf("r", 0.0), leaf("early", 1.0, "r", "x", 1), leaf("late", 1.0, "r", "y", 2)]
    first, second = tree_nodes(leaves)
    assert (first.call, first.children, first.leaves, first.value) == ("x", ("early",), 3, pytest.approx(2 / 3))
    assert (second.call, second.leaves, second.value) == ("y", 2, 0.5)


def test_the_branch_points_on_a_rows_way_lie_where_its_answers_begin():
    """A root, its child at the second answer, and a grandchild at the child's third: each on the way of all below it."""
    rows = [
        row("r", 0.0),
        row("c", 1.0, parent="r", call="r1", own_from=16),
        row("g", 0.5, parent="c", call="c2", own_from=26),
    ]
    tree = ValueTree([leaf("r", 0.0), leaf("c", 1.0, "r", "r1", 1), leaf("g", 0.5, "c", "c2", 2)])
    found = [[(node.call, node.start, node.leaves, node.value) for node in tree.nodes_of(one)] for one in rows]
    outer, inner = ("r1", 16, 3, 0.5), ("c2", 26, 2, 0.75)
    assert found == [[outer], [outer, inner], [outer, inner]]


def test_a_row_that_does_not_go_through_the_branch_point_has_none():
    """Of a sub-agent, say: what it shares with the parent ends where no answer begins."""
    tree = ValueTree([leaf("r", 0.0), leaf("c", 1.0, "r", "r1", 1)])
    assert tree.nodes_of(row("c", 1.0, parent="r", call="r1", own_from=10)) == ()


def test_a_part_between_branch_points_has_the_difference_of_their_values():
    rows = [
        row("r", 0.0),
        row("a", 1.0, parent="r", call="r1", own_from=16),
        row("b", 1.0, parent="r", call="r1", own_from=16),
        row("other", 0.0),
    ]
    mean, node = 0.5, pytest.approx(2 / 3 - 0.5)
    found = node_advantages(rows, scale=False)
    assert found["r", 0] == [(0, node), (16, pytest.approx(-2 / 3))]
    assert found["a", 0] == found["b", 0] == [(0, node), (16, pytest.approx(1 / 3))]
    assert found["other", 0] == [(0, -mean)]
    doubled = node_advantages(rows)  # the deviation of these four rewards is a half
    assert doubled["other", 0] == [(0, -1.0)] and doubled["r", 0][1] == (16, pytest.approx(-4 / 3))


def test_a_flat_group_has_the_advantages_of_its_rollouts():
    rows = [row("a", 1.0), row("b", 0.0), row("c", 0.0), row("lone", 1.0, group="h")]
    whole = advantages(rows)
    assert node_advantages(rows) == {(name, 0): [(0, pytest.approx(whole[name]))] for name in whole}
