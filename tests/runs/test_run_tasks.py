"""`await ry.run(...)`: a run in one call."""

import socket

import pytest

import rollyard as ry
from rollyard import sync
from rollyard.core.errors import ConfigError, Error
from rollyard.tasks.scaffold import new_script, new_task

pytestmark = pytest.mark.anyio


@pytest.fixture
def hello(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new_task(tmp_path / "hello")
    new_script(tmp_path / "script.yaml")
    return "hello"


async def test_it_opens_store_gate_and_policy_and_gives_the_rollouts(hello, backend):
    done = await ry.run(
        hello, agent=["shell-agent", "nop"], policy="scripted:script.yaml", attempts=2, name="mine", sandbox=backend
    )
    assert sorted((one.agent, one.reward) for one in done) == [
        ("nop", 0),
        ("nop", 0),
        ("shell-agent", 1),
        ("shell-agent", 1),
    ]
    async with ry.Store.open("runs.db", create=False) as store:
        kind, run_id = await store.resolve("mine")
        assert kind == "run" and {one.run_id for one in done} == {run_id}
        config = (await store.get_run(run_id)).config
    assert config["tasks"].endswith("/hello") and config["policies"]["policy"].endswith("/script.yaml")


async def test_policies_by_name_are_compared_and_an_open_store_stays_open(hello, backend):
    wrong = ry.policy.scripted([{"text": "nothing to do"}])
    (task,) = ry.Taskset.load(hello)
    async with ry.Store.open("mine.db") as store:
        policies = {"right": "scripted:script.yaml", "wrong": wrong}
        done = await ry.run(task, agent="shell-agent", policy=policies, store=store, sandbox=backend)
        assert {one.labels["policy"]: one.reward for one in done} == {"right": 1.0, "wrong": 0.0}
        assert len(await store.list_runs()) == 1
    await wrong.aclose()


async def test_an_agent_that_calls_no_model_needs_no_policy(hello, backend):
    (done,) = await ry.run(hello, agent="oracle", sandbox=backend)
    assert done.reward == 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no policy answers the model calls of shell-agent"),
        ({"policy": "scripted:script.yaml", "base_url": "http://127.0.0.1:9/v1"}, "both say who answers"),
        ({"policy": "scripted:script.yaml", "atempts": 2}, "did you mean 'attempts'?"),
        ({"policy": "scripted:script.yaml", "tasks_": "x"}, "no field of a run named 'tasks_'"),
        ({"policy": "scripted:script.yaml", "name": "last"}, "is no name for a run"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_is_made(hello, tmp_path, given, said):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        await ry.run(hello, agent="shell-agent", **given)
    assert not (tmp_path / "runs.db").exists()


async def test_a_server_that_does_not_answer_is_told_before_a_rollout_begins(hello, backend):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    with pytest.raises(Error, match="no answer from"):
        await ry.run(hello, agent="shell-agent", base_url=url, sandbox=backend)


def test_the_blocking_one_is_the_same(hello):
    (done,) = sync.run(hello, agent="nop")
    assert done.reward == 0.0
