"""A run with a tree: each rollout that is committed owes its children, which go on from one of its calls."""

from __future__ import annotations

import json
from itertools import count

import pytest
from pyarrow import parquet

import rollyard as ry
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs import Tree
from rollyard.runs.report.tree import draw_tree
from rollyard.runs.run.config import RunConfig, convert
from rollyard.store.listing import find_branches
from rollyard.trajectory.value_tree import TreeLeaf, tree_nodes

pytestmark = pytest.mark.anyio


def leaf(name, reward, parent=None, call=None):
    return TreeLeaf(
        id=name, task_id="t", agent="a", status="completed", reward=reward, parent=parent, call=call, place=0
    )


def test_every_attempt_of_a_tree_has_one_number_and_one_parent():
    tree, roots = Tree(width=3, depth=2), 2
    first = [number for root in range(roots) for number in tree.children_of(root, roots)]
    second = [number for child in first for number in tree.children_of(child, roots)]
    assert [*range(roots), *first, *second] == list(range(2 + 6 + 18))
    assert {tree.parent_of(number, roots) for number in tree.children_of(4, roots)} == {4}
    assert [tree.level_of(number, roots) for number in (0, 1, 2, 7, 8, 25)] == [0, 0, 1, 1, 2, 2]


def test_a_branch_point_is_worth_the_mean_of_its_leaves_and_the_tree_is_drawn():
    leaves = [leaf("r", 0.0), leaf("c1", 1.0, "r", "x"), leaf("c2", None, "r", "x"), leaf("g", 0.5, "c1", "y")]
    outer, inner = tree_nodes(leaves)
    assert (outer.rollout, outer.call, outer.children, outer.leaves, outer.value) == ("r", "x", ("c1", "c2"), 4, 0.5)
    assert (inner.rollout, inner.call, inner.leaves, inner.value) == ("c1", "y", 2, 0.75)
    assert draw_tree(leaves) == [
        "t a  r  completed  reward 0",
        "  at x  value 0.5 of 4 leaves",
        "    c1  completed  reward 1",
        "      at y  value 0.75 of 2 leaves",
        "        g  completed  reward 0.5",
        "    c2  completed  reward -",
    ]
    assert draw_tree([leaf("alone", 1.0)]) == []


async def test_children_are_owed_with_their_parent_and_a_stopped_tree_grows_on_when_resumed(tmp_path, backend):
    numbers = count()

    def answer(call):
        said = sum(message.role == "assistant" for message in call.messages)
        if said == 1:
            return {"shell": f"echo {'right' if next(numbers) else 'wrong'} > c.txt"}
        return {"shell": "echo one > a.txt"} if not said else {"text": "done"}

    judge = VerifierSpec(kind="commands", options={"commands": ['test "$(cat c.txt)" = right']})
    task = Task(id="t", instruction="x", verifier=judge)
    given = {"agent": "shell-agent", "sandbox": backend}
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted(answer), log=store) as gate:
        async with ry.Run([task], gate=gate, store=store, tree=Tree(width=2, depth=1, at=1), **given) as run:
            root = await anext(aiter(run))
        counts = await store.progress(run.id)
        assert (root.reward, counts["done"], sum(counts.values())) == (0.0, 1, 3)
        config = convert((await store.get_run(run.id)).config, "kept")
        async with ry.Run([task], gate=gate, store=store, config=config, resume=run.id, **given) as again:
            children = [r async for r in again]
        at = root.captured.records[1].id
        assert {(c.parent_rollout, c.parent_call, c.reward, c.replayed) for c in children} == {(root.id, at, 1.0, 1)}
        assert len(children) == 2 and {c.group_id for c in children} == {root.group_id}
        assert set((await find_branches(store, root)).children) == {c.id for c in children}
        found = await ry.report(store, run.id)
        (node,) = found.nodes
        assert (node.rollout, node.call, node.leaves, round(node.value, 3)) == (root.id, at, 3, 0.667)
        assert f"  at {at}  value 0.667 of 3 leaves" in str(found)
        await ry.export(store, run.id, tmp_path / "rows.jsonl", format="samples")
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        start = len(root.captured.prompt_ids(at))
        assert [row["own_from"] for row in rows] == [0, start, start]
        for row in rows:
            assert row["nodes"] == [
                {"rollout": root.id, "call": at, "start": start, "leaves": 3, "value": pytest.approx(2 / 3)}
            ]
            assert row["input_ids"][:start] == rows[0]["input_ids"][:start]
        await ry.export(store, run.id, tmp_path / "rows.parquet")
        assert parquet.read_table(tmp_path / "rows.parquet").column("nodes").to_pylist() == [
            row["nodes"] for row in rows
        ]


async def test_a_tree_that_cannot_grow_is_refused_before_anything_opens(tmp_path, backend):
    with pytest.raises(ConfigError, match="width"):
        Tree(width=0)
    with pytest.raises(ConfigError, match=r"^'4x2' describes no tree \(width=4,depth=2,at=3\)$"):
        Tree.parse("4x2")
    assert Tree.parse("width=4,at=3") == Tree(width=4, at=3)
    task = Task(id="t", instruction="x")
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted({"steps": []})) as gate:
        config = RunConfig(tree=Tree())
        with pytest.raises(Unsupported, match="'oracle' calls no model: it cannot branch at one"):
            async with ry.Run([task], config=config, agent="oracle", gate=gate, store=store, sandbox=backend):
                pass
        assert await store.list_runs() == []
