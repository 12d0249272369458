"""A kept rollout branches at one of its calls: recorded answers before it, compared call by call; the policy's own after it."""

from __future__ import annotations

import json
import sys

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs.branch import branch_config
from rollyard.runs.report.why import explain
from rollyard.runs.run.config import convert
from rollyard.runs.run.drive import carry_out
from rollyard.store.check import check_run

pytestmark = pytest.mark.anyio

CHECK = 'test "$(cat c.txt)" = right'


def script(third, *, second="cat a.txt > b.txt; cat b.txt"):
    steps = [{"shell": "echo one > a.txt"}, {"shell": second}, {"shell": f"echo {third} > c.txt"}, {"text": "done"}]
    return ry.policy.scripted({"steps": steps})


async def one_parent(store, backend, policy, *, agent="shell-agent", check=CHECK, **fields):
    task = Task(id="t", instruction="x", verifier=VerifierSpec(kind="commands", options={"commands": [check]}))
    async with (
        ry.Gate(policy, log=store) as gate,
        ry.Run([task], agent=agent, sandbox=backend, gate=gate, store=store, **fields) as run,
    ):
        (parent,) = [r async for r in run]
        return parent


def agents_calls(rollout):
    return [record for record in rollout.captured.records if record.kind == "agent"]


async def test_children_go_on_from_a_call_with_their_own_answers_and_train_on_those_alone(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, script("wrong"))
        at = agents_calls(parent)[2].id
        children = await ry.branch(parent, at=at, n=2, policy=script("right"), store=store, sandbox=backend)
        assert (parent.reward, [child.reward for child in children]) == (0.0, [1.0, 1.0])
        for child in children:
            assert (child.parent_rollout, child.parent_call, child.status) == (parent.id, at, "completed")
            assert (child.replayed, child.pinned, child.calls) == (2, 0, 2)
            assert child.usage["completion_tokens"] == sum(len(turn.completion_ids) for turn in child.turns[2:])
            (row,) = ry.samples(child).rows
            (before,) = ry.samples(parent).rows
            offset = len(parent.captured.prompt_ids(at))
            assert row.ids[:offset] == before.ids[:offset]  # the parent's very tokens
            assert (row.mask.index(1), row.own_from) == (offset, offset)
            assert row.parent_rollout == parent.id and row.parent_call == at
        assert (await check_run(store, children[0].run_id)).ok  # every law of a trajectory holds


async def test_a_child_that_asks_something_else_is_refused_with_the_difference(tmp_path, backend):
    """What a command printed is another word: no clock wrote it, so the child is not where its parent was."""
    flip = "mkdir -p /var/tmp/x; if test -e a.txt; then tr a-z A-Z < /proc/sys/kernel/random/uuid | tr -d 0-9-; fi"
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, script("wrong", second=f"{flip} | tr A-F g-l"))
        (child,) = await ry.branch(parent, at=2, policy=script("right"), store=store, sandbox=backend)
        assert (child.status, child.reward, child.failure.cause) == ("cancelled", None, "BranchDiverged")
        assert not child.failure.retry and not child.trainable
        assert "--- recorded" in child.failure.message and parent.captured.records[2].id in child.failure.message
        assert ry.samples(child, unscored=True).rows == ()


async def test_a_clock_in_the_prefix_is_pinned_to_the_parents_and_told(tmp_path, backend):
    """The command prints the time: the policy is given the parent's words, now and for the rest of the rollout."""
    clocked = "echo took; date +%s.%N; head -c4 /dev/urandom | od -An -tx4"
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, script("wrong", second=clocked))
        (child,) = await ry.branch(parent, at=2, policy=script("right"), store=store, sandbox=backend)
        assert (child.status, child.reward, child.pinned) == ("completed", 1.0, 1)
        at, own = parent.captured.records[2].id, child.captured.records
        assert child.captured.prompt_ids(own[2].id) == parent.captured.prompt_ids(at)
        (branch,) = child.captured.branches  # the later call goes on from the pinned words: nothing forks
        assert branch.messages[: len(parent.captured.messages(at))] == parent.captured.messages(at)
        grandchild = (await ry.branch(child, at=3, policy=script("right"), store=store, sandbox=backend))[0]
        assert (grandchild.status, grandchild.replayed, grandchild.pinned) == ("completed", 3, 2)


async def test_an_agent_that_ends_before_the_branch_point_is_no_branch(tmp_path, backend):
    """A command ended it, and does so again: nothing of it is judged or trained on."""
    steps = [{"shell": "echo one > a.txt"}, {"shell": "kill -9 $PPID"}, {"text": "done"}]
    async with ry.Store.open(tmp_path / "runs.db") as store:
        cut = await one_parent(store, backend, ry.policy.scripted({"steps": steps}))
        assert (cut.status, cut.reward, cut.calls) == ("agent_error", 0.0, 2)
        (child,) = await ry.branch(cut, at="end", policy=script("right"), store=store, sandbox=backend)
        assert (child.status, child.reward, child.failure.cause) == ("cancelled", None, "BranchDiverged")
        assert "made 2 of the parent's 2 calls" in child.failure.message


async def test_what_cannot_be_branched_at_is_said_by_name_before_anything_opens(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, script("wrong"))
        with pytest.raises(ConfigError, match="no call begins with '9'"):
            await ry.branch(parent, at=9, policy=script("right"), store=store)
        with pytest.raises(ConfigError, match="is a run; name one rollout of it"):
            await ry.branch(parent.run_id, at=2, policy=script("right"), store=store)
        with pytest.raises(ConfigError, match="no policy is named to go on with"):
            await ry.branch(parent, at=2, store=store)
        with pytest.raises(ConfigError, match="there is no snapshot of the sandbox at that call"):
            await ry.branch(parent, at=2, policy=script("right"), store=store, how="resume")
        with pytest.raises(ConfigError, match="not behind its end"):
            await ry.branch(parent, at="end", policy=script("right"), store=store, how="resume")
        assert len(await store.list_runs()) == 1


async def test_a_branch_after_parallel_tool_calls_has_the_results_of_all(tmp_path, backend):
    def both(last):
        wide = {"parallel": [{"shell": "echo one > a.txt; cat a.txt"}, {"shell": "echo two > b.txt; cat b.txt"}]}
        return ry.policy.scripted({"steps": [wide, {"shell": f"echo {last} > c.txt"}, {"text": "done"}]})

    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, both("wrong"))
        (child,) = await ry.branch(parent, at=1, policy=both("right"), store=store, sandbox=backend)
        assert (child.status, child.reward, child.replayed, child.pinned) == ("completed", 1.0, 1, 0)
        results = [
            part for message in child.captured.messages(child.captured.records[1].id) for part in message.tool_results
        ]
        assert len(results) == 2


async def test_what_if_the_model_had_said_this(tmp_path, backend):
    """An answer that somebody wrote is acted upon like any other, trains nowhere, and the policy goes on from it."""
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, script("wrong"))
        tool = parent.captured.answer(parent.captured.records[2].id).message.tool_calls[0]
        wrong = json.loads(tool.arguments)
        changed = {name: text.replace("wrong", "right") for name, text in wrong.items() if isinstance(text, str)}
        answer = {"text": "better:", "tool_calls": [{"name": tool.name, "arguments": {**wrong, **changed}}]}
        done = ry.policy.scripted(lambda call: {"text": "done"})
        (child,) = await ry.branch(parent, at=2, answer=answer, policy=done, store=store, sandbox=backend)
        assert (child.status, child.reward, child.replayed, child.calls) == ("completed", 1.0, 2, 1)
        said = child.captured.records[2]
        assert (said.trainable, said.flaws) == (False, ("said by the caller",))
        assert child.captured.answer(said.id).message.text == "better:"
        with pytest.raises(ConfigError, match="the answer is not one"):
            await ry.branch(parent, at=2, answer='{"say": 1}', policy=done, store=store)
        with pytest.raises(ConfigError, match="branch_answer needs a call"):
            await ry.branch(parent, at="end", answer="x", policy=done, store=store)


async def test_an_attempt_that_ran_out_of_its_budget_goes_on_to_where_an_uncut_one_gets(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        cut = await one_parent(store, backend, script("right"), max_calls=2, collect=("*.txt",))
        whole = await one_parent(store, backend, script("right"), collect=("*.txt",))
        assert (cut.status, cut.stop_reason, cut.reward) == ("budget", "calls", 0.0)
        (on,) = await ry.branch(cut, at="end", policy=script("right"), store=store, sandbox=backend)
        assert (on.status, on.reward, on.replayed, on.calls) == ("completed", 1.0, 2, 2)
        assert (on.parent_rollout, on.parent_call) == (cut.id, "end")
        assert on.files == whole.files and len(whole.files) == 3
        assert f"rollyard continue {cut.id}" in explain(cut).remedy


@pytest.mark.slow
async def test_a_branched_run_that_was_stopped_is_resumed_like_any_other(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        parent = await one_parent(store, backend, script("wrong"))
        config = await branch_config(store, parent.id, "2", {"attempts": 2, "parallel": 1}, answered=True)
        async with (
            ry.Gate(script("right"), log=store) as gate,
            ry.Run([parent.task], config=config, gate=gate, store=store, sandbox=backend) as run,
        ):
            async for _ in run:
                break
        assert len([r async for r in store.rollouts(run.id)]) == 1
        config = convert((await store.get_run(run.id)).config, "kept")
        done = await carry_out(
            config, store=store, resume=run.id, sandbox=backend, answering={"policy": script("right")}
        )
        assert (done.attempts, done.scored, done.replayed) == (2, 2, 4)
        assert {r.parent_rollout async for r in store.rollouts(run.id)} == {parent.id}


@pytest.mark.slow
async def test_the_command_line_branches_and_continues_and_every_verb_tells_of_it(tmp_path, backend):
    db, right = str(tmp_path / "runs.db"), tmp_path / "right.json"
    steps = [{"shell": "echo one > a.txt"}, {"shell": "cat a.txt > b.txt; cat b.txt"}]
    right.write_text(json.dumps({"steps": [*steps, {"shell": "echo right > c.txt"}, {"text": "done"}]}))
    async with ry.Store.open(db) as store:
        parent = await one_parent(store, backend, script("wrong"), max_calls=3)
    policy = ("--policy", f"scripted:{right}", "--store", db, "--json")
    report = json.loads(
        (await rollyard("branch", parent.id, "--at", "2", "--n", "2", "--parallel", "auto", *policy)).stdout
    )
    at = parent.captured.records[2].id
    assert (report["scored"], report["replayed"], report["branch"]) == (2, 4, f"{parent.id}@{at}")
    again = json.loads((await rollyard("continue", parent.id, *policy, "--max-calls", "9")).stdout)
    assert (again["scored"], again["replayed"], again["branch"]) == (1, 3, f"{parent.id}@end")
    shown = (await rollyard("show", parent.id, "--store", db)).stdout.decode()
    assert f"branched by run {report['run_id']}" in shown and f"branched by run {again['run_id']}" in shown
    async with ry.Store.open(db) as store:
        child = [r async for r in store.rollouts(report["run_id"])][0]
        assert f"branches off {parent.id}@{at}: 4 calls" in str(await ry.report(store, report["run_id"]))
        await ry.export(store, report["run_id"], tmp_path / "rows.jsonl", format="samples")
    shown = (await rollyard("show", child.id, "--store", db)).stdout.decode()
    assert f"branches off {parent.id} at {at}: 2 calls answered as its were" in shown
    assert shown.count(" replayed ") == 2
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {(row["parent_rollout"], row["parent_call"]) for row in rows} == {(parent.id, at)}
    assert all(row["own_from"] == row["loss_mask"].index(1) > row["prompt_len"] for row in rows)
    wrong = await rollyard("branch", parent.id, "--at", "77", *policy, check=False)
    assert wrong.returncode == 2 and "no call begins with '77'" in json.loads(wrong.stdout)["message"]


async def rollyard(*words, check=True):
    return await anyio.run_process([sys.executable, "-m", "rollyard", *words], check=check, stderr=None)
