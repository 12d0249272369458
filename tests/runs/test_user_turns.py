"""A simulated user answers the agent's last message until it is content: one verdict, both sides' calls told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.task import Task, VerifierSpec
from rollyard.store.check import check_run
from tests.runs.test_branch import rollyard
from tests.servers.smollm import llama_server, weights

pytestmark = pytest.mark.anyio

TASK = Task(
    id="greeting",
    instruction="Ask me what to write.",
    metadata={"user": "You want the word blue in a.txt, and after that the word red."},
    verifier=VerifierSpec(kind="commands", options={"commands": ['test "$(cat a.txt)" = red']}),
)


def assistant(call):
    """Writes the word that the user said last, then asks again."""
    said = [message.text for message in call.messages if message.role == "user"][-1]
    if call.messages[-1].role == "tool" or "Ask me" in said:
        return {"text": f"What now? {len(call.messages)}"}
    return {"shell": f"echo {said} > a.txt"}


def write_user(folder, *words):
    file = folder / "user.json"
    file.write_text(json.dumps({"steps": [{"text": word} for word in words]}))
    return f"scripted:{file}"


async def rows_of(store, run, folder, format, **asked):
    out = folder / "rows.jsonl"
    await ry.export(store, run, out, format=format, **asked)
    return [json.loads(line) for line in out.read_text().splitlines()]


async def test_a_scripted_user_answers_until_it_is_content_and_each_side_trains_apart(tmp_path, backend):
    user = write_user(tmp_path, "blue", "red")
    async with ry.Store.open(tmp_path / "runs.db") as store:
        async with (
            ry.Gate(ry.policy.scripted(assistant), log=store) as gate,
            ry.Run([TASK], agent="shell-agent", sandbox=backend, gate=gate, store=store, user=user) as run,
        ):
            (done,) = [r async for r in run]
        assert (done.status, done.reward, done.stop_reason) == ("completed", 1.0, None), done.error
        kept = await store.get_rollout(done.id)
        kinds = [record.kind for record in kept.captured.records]
        assert kinds == ["agent", "user", "agent", "agent", "user", "agent", "agent", "user"]
        assert kept.calls == 5  # its own; the user's are not charged to the agent
        theirs = [record for record in kept.captured.records if record.kind == "user"]
        first = kept.captured.messages(theirs[0].id)
        assert "the word blue in a.txt" in first[0].text and first[1].text.startswith("What now?")
        assert kept.captured.answer(theirs[-1].id).message.text == "###STOP###"
        (own,) = ry.samples(kept).rows
        (users,) = ry.samples(kept, kinds=("user",)).rows
        assert {own.kind, users.kind} == {"agent", "user"} and own.trained and users.trained
        assert not set(own.call_ids) & set(users.call_ids) and len(users.call_ids) == 3
        assert own.reward == users.reward == 1.0
        assert [kept_row["kind"] for kept_row in await rows_of(store, run.id, tmp_path, "samples")] == ["agent"]
        theirs = await rows_of(store, run.id, tmp_path, "samples", kinds=("user",))
        assert [(one["kind"], one["call_ids"]) for one in theirs] == [("user", list(users.call_ids))]
        assert {one["kind"] for one in await rows_of(store, run.id, tmp_path, "turns")} == {"agent", "user"}
        assert {one["kind"] for one in await rows_of(store, run.id, tmp_path, "turns", kinds=("user",))} == {"user"}
        with pytest.raises(ConfigError, match="the format 'atif' has all kinds of calls"):
            await rows_of(store, run.id, tmp_path, "atif", kinds=("user",))
        with pytest.raises(ConfigError, match="users"):
            await rows_of(store, run.id, tmp_path, "samples", kinds=("users",))
        assert (await check_run(store, run.id)).ok
        with pytest.raises(ConfigError, match="has turns of a user"):
            await ry.branch(kept, at=2, policy=ry.policy.scripted(assistant), store=store)


async def test_a_user_that_is_never_content_has_so_many_turns(tmp_path, backend):
    user = write_user(tmp_path, *["blue"] * 9)
    done = await ry.run_rollout(
        TASK, agent="shell-agent", policy=ry.policy.scripted(assistant), sandbox=backend, user=user, user_turns=2
    )
    assert (done.status, done.reward, done.stop_reason, done.calls) == ("completed", 0.0, "user_turns", 5)


async def test_a_user_whose_server_fails_is_no_reward(backend, tmp_path):
    user = tmp_path / "user.json"
    user.write_text(json.dumps({"steps": [{"error": 503, "times": 9}, {"text": "blue"}]}))
    done = await ry.run_rollout(
        TASK, agent="shell-agent", policy=ry.policy.scripted(assistant), sandbox=backend, user=f"scripted:{user}"
    )
    assert (done.status, done.reward, done.failure.boundary) == ("infra_error", None, "policy")


async def test_an_agent_without_sessions_and_a_task_with_steps_have_no_user(backend):
    with pytest.raises(Unsupported, match="no user can answer it"):
        await ry.run_rollout(
            "x", agent="tool-agent", policy=ry.policy.scripted(assistant), sandbox=backend, user="scripted:x"
        )
    with pytest.raises(ConfigError, match="cannot read the script none.json"):
        await ry.run_rollout(
            "x", agent="shell-agent", policy=ry.policy.scripted(assistant), sandbox=backend, user="scripted:none.json"
        )
    with pytest.raises(ConfigError, match="user_turns without a user"):
        await ry.run_rollout("x", policy=ry.policy.scripted(assistant), sandbox=backend, user_turns=2)


async def test_the_example_of_a_customer_gets_what_they_want(tmp_path, backend):
    folder = Path(__file__).parents[2] / "examples" / "users"
    (task,) = ry.Taskset.load(folder / "tasks")
    done = await ry.run_rollout(
        task,
        agent="shell-agent",
        policy=ry.policy.scripted(folder / "assistant.yaml"),
        sandbox=backend,
        user=f"scripted:{folder / 'user.yaml'}",
    )
    assert (done.status, done.reward) == ("completed", 1.0), done.error
    first = next(record for record in done.captured.records if record.kind == "user")
    assert "You are Ada Moss." in done.captured.messages(first.id)[0].text


@pytest.mark.slow
async def test_a_language_model_is_the_customer_of_the_example_and_its_words_train_apart(tmp_path, backend):
    """A real one, too small to be a good customer: what it says reaches the agent, with the tokens that it sampled."""
    pytest.importorskip("xllamacpp", reason="the llama.cpp server is not installed")
    (task,) = ry.Taskset.load(Path(__file__).parents[2] / "examples" / "users" / "tasks")

    def assistant(call):
        said = [message.text for message in call.messages if message.role == "user"]
        return {"text": f"I have heard {len(said)} messages. What is the number of your order?"}

    with llama_server() as url:
        done = await ry.run_rollout(
            task,
            agent="shell-agent",
            policy=ry.policy.scripted(assistant),
            sandbox=backend,
            user=f"tokens:{url}#renderer={weights()}&max_tokens_cap=60",
            user_turns=2,
        )
    assert (done.status, done.reward) == ("completed", 0.0), done.error
    calls = [(record.kind, done.captured.answer(record.id).message.text) for record in done.captured.records]
    kinds = [kind for kind, _ in calls]
    assert kinds[:2] == ["agent", "user"] and set(kinds) == {"agent", "user"}
    own = next(branch for branch in done.captured.branches if branch.kind == "agent")
    heard = [message.text for message in own.messages if message.role == "user"]
    words = [text for kind, text in calls if kind == "user" and "###STOP###" not in text]
    assert words and all(text in heard for text in words)
    (row,) = ry.samples(done, kinds=("user",)).rows
    assert row.kind == "user" and any(row.logprobs[at] < 0.0 for at in range(len(row.ids)) if row.mask[at])
    assert {row.kind for row in ry.samples(done).rows} == {"agent"}


@pytest.mark.slow
async def test_a_user_on_the_command_line(tmp_path):
    script = tmp_path / "agent.json"
    script.write_text(json.dumps({"steps": [{"text": "What?"}, {"shell": "echo red > a.txt"}, {"text": "done"}]}))
    user = write_user(tmp_path, "red")
    words = ("run", "--instruction", "Ask.", "--verify", "grep -q red a.txt", "--agent", "shell-agent", "--json")
    done = await rollyard(
        *words, "--policy", f"scripted:{script}", "--user", user, "--store", str(tmp_path / "runs.db")
    )
    assert json.loads(done.stdout)["verdict"]["reward"] == 1.0
