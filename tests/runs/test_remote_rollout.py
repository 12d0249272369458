"""Tasks of remote environments as rollouts: the real `fleet-python` SDK, instances of this project's own Fleet API, any agent."""

import json

import msgspec
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.message import Image
from rollyard.core.remote_task import TaskConfig
from rollyard.envs.fleet.sdk import FleetProvider
from rollyard.runs.rescore import rescore
from rollyard.testing.serve import serve_app
from rollyard.tools import Toolset, tool
from rollyard.trajectory.samples import samples
from tests.envs.test_task_screens import PICTURE, Borrowed, Paged, screen
from tests.fleet_server import KEY, WORLDS, serving

pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
pytestmark = pytest.mark.anyio
TASKS = f"{WORLDS}/tickets/tasks.json#fleet"
CLOSE = [
    {"tool": "list_tickets"},
    {"tool": "set_state", "args": {"ticket_id": 1, "state": "closed"}},
    {"text": "done"},
]
COUNT = [{"tool": "submit_final_answer", "args": {"answer": "3"}}, {"tool": "list_tickets"}, {"text": "done"}]


@pytest.fixture
async def server(monkeypatch):
    async with serving() as made:
        monkeypatch.setenv("FLEET_API_KEY", KEY)
        monkeypatch.setenv("FLEET_BASE_URL", made.url)
        yield made


def tasks():
    return ry.Taskset.load(TASKS)


class Model:
    """Plays a script and keeps the calls that it heard."""

    def __init__(self, script):
        self.script, self.calls = script, []

    def __call__(self, call):
        self.calls.append(call)
        turn = sum(message.role == "assistant" for message in call.messages)
        return self.script[min(turn, len(self.script) - 1)]


async def work(server, task, script, **options):
    model = script if callable(script) else Model(script)
    options = {"agent": "tool-agent", "policy": ry.policy.scripted(model), "sandbox": server.backend, **options}
    return await ry.run_rollout(task, **options)


async def test_a_task_file_of_fleet_is_a_taskset_of_rollouts(server):
    model = Model(CLOSE)
    done = await work(server, tasks()["close-printer"], model)
    assert (done.status, done.reward, done.failure) == ("completed", 1.0, None), done.error
    assert done.verdict.grade == "sealed" and "SUCCESS_ACCUMULATOR" in done.verdict.log
    offered = [spec.name for spec in model.calls[0].tools]
    assert offered == ["list_tickets", "get_ticket", "set_state", "add_note"], "and no shell"
    (branch,) = done.trajectory.branches
    assert "Printer on floor 3" in str(branch.messages)
    (row,) = samples(done).rows
    assert row.reward == 1.0 and row.trained > 0
    assert await server.left() == [] and await server.backend.list({"rollyard.rollout": done.id}) == []


HALF = """
def half(env):
    print('>>> ERROR_ACCUMULATOR >>> ["a"] <<< ERROR_ACCUMULATOR <<< >>> SUCCESS_ACCUMULATOR >>> ["b"]')
    return 0
"""


@pytest.mark.slow
async def test_an_attempt_that_failed_gets_the_share_of_what_held_where_the_task_says_so(server):
    config = TaskConfig(env_key="tickets", prompt="Do it.", verifier_code=HALF)
    assert (await work(server, config, [{"text": "I will not"}])).reward == 0.0
    shared = msgspec.structs.replace(config, partial_reward=True)
    assert (await work(server, shared, [{"text": "I will not"}])).reward == 0.5


async def test_the_answer_goes_to_the_verifier_and_ends_the_tools(server):
    model = Model(COUNT)
    done = await work(server, tasks()["count-open"], model)
    assert done.reward == 1.0, done.verdict
    assert "submit_final_answer" in [spec.name for spec in model.calls[0].tools]
    assert "handed in" in str(model.calls[1].messages[-1]) and "the task is over" in str(model.calls[2].messages[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"), [("def f(env): raise ValueError('no')", "no"), ("def f(env) return 1", "Syntax")]
)
async def test_a_verifier_that_does_not_run_gives_no_reward(server, code, words):
    done = await work(server, TaskConfig(env_key="tickets", prompt="Do it.", verifier_code=code), [{"text": "done"}])
    assert done.reward is None and done.verdict.status == "failed" and words in done.verdict.error


@pytest.mark.slow
async def test_an_agent_that_is_cut_off_is_judged(server):
    config = TaskConfig(env_key="tickets", prompt="Do it.", verifier_code="def f(env): return 0.25")
    cut = await work(server, config, [CLOSE[0]] * 4, max_calls=2)
    assert cut.status == "budget" and cut.reward == 0.25


@pytest.mark.parametrize("when", ["while the agent works", "after its last call"])
async def test_an_instance_that_is_lost_is_a_failure_of_the_environment_and_nobodys_zero(server, when):
    """Whether the agent saw it or the verifier did, and whatever the verifier would have made of it."""
    model = Model(CLOSE)
    at = {"while the agent works": 0, "after its last call": 2}[when]
    task = tasks()["close-printer"]
    if at == 0:
        task = TaskConfig(env_key="tickets", prompt="Do it.", verifier_code="def f(env): return 0.0")

    async def losing(call):
        if len(model.calls) == at:
            (row,) = [row async for row in server.plane.instances.all(live=True)]
            await server.places.close(await server.places.find(row.id), "a test")
        return model(call)

    lost = await work(server, task, losing)
    assert lost.reward is None and lost.failure is not None, lost.verdict
    cause = ("EpisodeLost", "EnvUnavailable")[at > 0]
    assert (lost.status, lost.failure.boundary, lost.failure.cause) == ("infra_error", "env", cause), lost.error


async def test_what_cannot_work_is_refused_before_anything_is_made(server, monkeypatch):
    task = tasks()["close-printer"]
    with pytest.raises(Unsupported, match="MCP"):
        await work(server, task, CLOSE, agent="shell-agent", labels={"drill": "refused"})
    monkeypatch.delenv("FLEET_API_KEY")
    with pytest.raises(ConfigError, match="FLEET_API_KEY"):
        await work(server, task, CLOSE)
    assert server.seen.requests == [] and await server.backend.list({"drill": "refused"}) == []
    with pytest.raises(ConfigError, match="Harbor"):
        ry.Taskset([task]).to_folder("never-made")


async def test_an_environment_that_cannot_be_made_is_a_failure_of_the_environment(server):
    done = await work(server, TaskConfig(env_key="nowhere", prompt="x", verifier_code="def f(e): return 1"), CLOSE)
    assert (done.failure.boundary, done.failure.stage, done.reward) == ("env", "provision", None), done.failure
    assert "nowhere" in done.failure.message
    assert await server.backend.list({"rollyard.rollout": done.id}) == []


async def test_groups_of_attempts_run_are_stored_exported_and_shown(server, tmp_path):
    """Through `Run`: each attempt has an instance of its own, and what came of it is where all rollouts are."""
    policy = ry.policy.scripted(Model(CLOSE))
    config = TaskConfig(env_key="tickets", task_key="t", prompt="Close it.", verifier_code="def f(env): return 1.0")
    async with ry.Store.open(str(tmp_path / "runs.db")) as store, ry.Gate(policy, log=store) as gate:
        async with ry.Run(
            [config],
            attempts=2,
            agent="tool-agent",
            sandbox=server.backend,
            gate=gate,
            store=store,
        ) as run:
            done = [rollout async for rollout in run]
        assert [rollout.reward for rollout in done] == [1.0, 1.0] and len({rollout.group_id for rollout in done}) == 1
        made = [line for line in server.seen.requests if line == "POST /v1/env/instances"]
        assert len(made) == 2 and await server.left() == []
        kept = await store.get_rollout(done[0].id)
        assert kept.task.remote == config
        await ry.export(store, run.id, str(tmp_path / "batch.jsonl"))
        rows = [json.loads(line) for line in (tmp_path / "batch.jsonl").read_text().splitlines()]
        assert [row["reward"] for row in rows] == [1.0, 1.0]
        (again, *_) = [one async for one in rescore(store, run.id, sandbox=server.backend)]
        assert again.after is None and "is gone" in again.error
    assert await server.backend.list({"rollyard.run": run.id}) == []


@pytest.mark.slow
async def test_an_agent_that_works_on_a_screen_sees_it(monkeypatch):
    """computer_use: only `computer`, the first screen with the instruction, each further one after its call."""
    model = Model([{"tool": "computer", "args": {"action": "click", "coordinate": [1, 1]}}, {"text": "done"}])
    config = TaskConfig(env_key="screen", prompt="Look.", task_modality="computer_use")
    async with serving(worlds=[screen(PICTURE)]) as server:
        done = await work(server, config, model, provider=FleetProvider(KEY, server.url))
        assert done.status == "completed" and done.reward is None, done.error
    assert [spec.name for spec in model.calls[0].tools] == ["computer"]
    first, second = model.calls[0].messages[-1], model.calls[1].messages[-1]
    for message in (first, second):
        assert message.role == "user" and [part.data for part in message.parts if isinstance(part, Image)] == [PICTURE]
    assert first.text == "Look."


async def test_a_browser_is_leased_for_the_rollout_and_given_back(server):
    """browser_use: standard env + lease + navigate + health check, deleted at the end."""

    @tool
    async def computer(action: str) -> Image:
        """The screen."""
        return Image(media_type="image/png", data=PICTURE)

    toolset, provider = Toolset([computer]), Paged()
    async with serve_app(toolset) as url:
        leases = Borrowed(None, url + "/mcp")
        config = TaskConfig(env_key="paged", prompt="Look.", task_modality="browser_use")
        done = await work(server, config, [{"text": "done"}], provider=provider, leases=leases)
    await toolset.aclose()
    assert done.status == "completed", done.error
    assert leases.done[0].startswith("create ") and leases.done[1:] == [
        "navigate http://127.0.0.1:9/page/",
        "health",
        "delete",
    ]
    assert provider.closed == 1 and provider.requests[0].ttl_s >= ry.Limits().ttl_s
