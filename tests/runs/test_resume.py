"""A rollout branches by its agent's own session: from the files of a held call, with the parent's trajectory behind it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

import rollyard as ry
from rollyard.core.branch_point import RESUME_MARK
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.runs.snapshots import clean_snapshots
from rollyard.store.check import check_run
from tests.runs.test_branch import agents_calls, one_parent, script

pytestmark = pytest.mark.anyio


@pytest.fixture
async def backend(tmp_path):
    """With a store of images of its own: snapshots are left there."""
    async with ry.sandbox.backend("local", root=tmp_path / "home") as opened:
        yield opened


def counts(tag):
    """Leaves a line for every time it runs, and prints nothing."""
    return f"date +%s.%N >> {tag}.txt"


async def test_an_agent_goes_on_from_its_session_and_runs_nothing_again(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(
            store, backend, script("wrong", second=counts("b")), snapshot_every=2, collect=("*.txt",)
        )
        at = agents_calls(parent)[2].id
        assert list(parent.snapshots) == [at] and not parent.snapshots[at].background
        children = await ry.branch(
            parent, at=at, n=2, how="resume", policy=script("right"), store=store, sandbox=backend, collect=("*.txt",)
        )
        assert (parent.reward, [child.reward for child in children]) == (0.0, [1.0, 1.0])
        for child in children:
            assert (child.status, child.resumed, child.replayed, child.pinned, child.calls) == (
                "completed",
                True,
                2,
                0,
                2,
            )
            # The parent's own, to the nanosecond
            assert child.files["/workspace/b.txt"] == parent.files["/workspace/b.txt"]
            (row,), (before,) = ry.samples(child).rows, ry.samples(parent).rows
            offset = len(parent.captured.prompt_ids(at))
            assert row.ids[:offset] == before.ids[:offset]
            assert (row.mask.index(1), row.own_from) == (offset, offset)
            assert child.diff.count("+++") == 3  # against the task's beginning, and not against the branch point
            (path,) = child.captured.branches
            assert RESUME_MARK not in "".join(message.text for message in path.messages)
        assert (await check_run(store, children[0].run_id)).ok
        grandchild = (await ry.branch(children[0], at=3, policy=script("right"), store=store, sandbox=backend))[0]
        assert (grandchild.status, grandchild.resumed, grandchild.replayed) == ("completed", False, 3), grandchild.error


async def test_a_program_in_the_background_is_named_and_forces_replay(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        left = "sleep 600 > /dev/null 2>&1 &"
        parent = await one_parent(store, backend, script("wrong", second=left), snapshot_every=1)
        calls = agents_calls(parent)
        assert {call.id: parent.snapshots[call.id].background for call in calls[1:]} == {
            calls[1].id: (),
            calls[2].id: ("sleep",),
            calls[3].id: ("sleep",),
        }
        (child,) = await ry.branch(parent, at=2, policy=script("right"), store=store, sandbox=backend)
        assert (child.status, child.reward, child.resumed) == ("completed", 1.0, False)
        (child,) = await ry.branch(parent, at=2, how="resume", policy=script("right"), store=store, sandbox=backend)
        assert child.failure.cause == "Unsupported" and "in the background there" in child.failure.message
        (child,) = await ry.branch(parent, at=1, policy=script("right"), store=store, sandbox=backend)
        assert (child.status, child.resumed) == ("completed", True)


async def test_replay_takes_the_parents_files_where_its_commands_left_others(tmp_path, backend):
    """Time, a random name, a file of another kind and one that should not be there: all are the parent's at the branch point."""
    uneven = (
        "date +%s.%N > time.txt; mkdir -p d; cp /proc/sys/kernel/random/uuid d/$(cat /proc/sys/kernel/random/uuid).txt; "
        "echo same > same.txt; if test $(($(date +%s%N) / 1000 % 2)) = 0; then ln -s same.txt odd; else mkdir odd; fi"
    )
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, script("wrong", second=uneven), snapshot_every=2)
        (child,) = await ry.branch(parent, at=2, how="replay", policy=script("right"), store=store, sandbox=backend)
        assert (child.status, child.reward, child.resumed) == ("completed", 1.0, False)
        assert child.laid_over >= 3
        assert [line for line in child.diff.splitlines() if "right" not in line] == [
            line for line in parent.diff.splitlines() if "wrong" not in line
        ]


async def test_what_cannot_be_resumed_is_said_by_name(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, script("wrong"))
        with pytest.raises(Unsupported, match="no snapshot of the sandbox at that call"):
            await ry.branch(parent, at=2, how="resume", policy=script("right"), store=store, sandbox=backend)
        with pytest.raises(ConfigError, match="'again' is no way to branch"):
            await ry.branch(parent, at=2, how="again", policy=script("right"), store=store, sandbox=backend)
        with pytest.raises(ConfigError, match="nothing branches"):
            await one_parent(store, backend, script("wrong"), branch_how="resume")


@pytest.mark.slow
async def test_a_snapshot_goes_with_its_owner(tmp_path, backend):
    """By the verb for a run's; by itself where the rollout was given up. A branch at a call whose snapshot is gone replays."""
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, script("wrong"), snapshot_every=1)
        images = {kept.image for kept in parent.snapshots.values()}
        assert len(images) == 3 and images <= listed(backend)
        gone = await clean_snapshots(str(tmp_path / "runs.db"), parent.run_id, backend)
        assert set(gone) == images and not images & listed(backend)
        (child,) = await ry.branch(parent, at=2, policy=script("right"), store=store, sandbox=backend)
        assert (child.status, child.reward, child.resumed) == ("completed", 1.0, False)
        before, taken = listed(backend), anyio.Event()

        async def stuck(call):
            taken.set()
            await anyio.sleep_forever()

        async with anyio.create_task_group() as group:
            answers = iter(["echo one > a.txt"])
            hold = ry.policy.scripted(lambda call: {"shell": next(answers)} if len(call.messages) == 2 else stuck(call))
            group.start_soon(partial(one_parent, store, backend, hold, snapshot_every=1))
            await taken.wait()
            assert len(listed(backend) - before) == 1
            group.cancel_scope.cancel()
        assert listed(backend) <= before


def listed(backend):
    return {record.id for record in backend.images.catalog.records() if record.kind == "snapshot"}


async def test_a_session_that_is_not_where_its_parent_was_is_refused_with_the_difference(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, script("wrong", second="echo lantern"), snapshot_every=2)
        kept = parent.snapshots[agents_calls(parent)[2].id]
        assert not kept.background
        frozen = await backend.images.resolve(kept.image)
        places = [*frozen.lowers, *(place for tree in frozen.trees for place in tree.over)]
        (session,) = [found for place in places for found in Path(place).rglob(".shell-agent/session.json")]
        session.write_text(session.read_text().replace("lantern", "candle"))
        (child,) = await ry.branch(parent, at=2, policy=script("right"), store=store, sandbox=backend)
        assert (child.status, child.reward, child.failure.cause) == ("cancelled", None, "BranchDiverged")
        assert "-lantern" in child.failure.message and "+candle" in child.failure.message
        assert not child.trainable and ry.samples(child, unscored=True).rows == ()
