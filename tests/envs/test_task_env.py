"""Remote tasks: the real `fleet-python` SDK against the Fleet-shaped server, instances and verifiers in local sandboxes."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
import threading

import pytest

import rollyard as ry
from rollyard import sync
from rollyard.core.errors import ConfigError, EnvError, EnvUnavailable, MissingExtra, UnknownName, Unsupported
from rollyard.core.remote_task import TaskConfig
from rollyard.envs.fleet.provider import InstanceRequest, provision
from rollyard.envs.fleet.sdk import FleetProvider
from rollyard.envs.fleet.task_env import RemoteTaskEnv, TaskLimits
from rollyard.envs.fleet.verifier_code import Checked
from rollyard.envs.telemetry import Telemetry
from tests.fleet_server import KEY, WORLDS, serving

pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
pytestmark = pytest.mark.anyio
TASKS = WORLDS / "tickets" / "tasks.json"


@pytest.fixture
async def server():
    async with serving() as made:
        yield made


def env_of(server, task_key="close-printer", **options):
    options.setdefault("provider", FleetProvider(KEY, server.url, sdk_retries=0))
    return ry.TaskEnv.from_json_file(TASKS, task_key, sandbox=server.backend, **options)


def task(**fields):
    return {"env_key": "tickets", "task_key": "t", "prompt": "Do it.", **fields}


def env_with(server, **fields):
    return ry.TaskEnv(task(**fields), api_key=KEY, base_url=server.url, sandbox=server.backend)


# E2, E5: what is needed to make one


def test_only_env_key_is_required_and_the_rest_has_defaults(monkeypatch):
    """E2"""
    monkeypatch.setenv("FLEET_API_KEY", "k")
    env = ry.TaskEnv.from_config({"env_key": "tickets"})
    config = env.config
    assert (config.data_key, config.data_version, config.env_version, config.region) == (None, None, None, None)
    assert config.image is None and config.env_variables == {} and config.lifetime_s == 3600
    assert InstanceRequest(env_key="x").ttl_s == 3600 and InstanceRequest(env_key="x").image_type is None


def test_a_missing_api_key_fails_at_construction_naming_the_variable(monkeypatch):
    """E2"""
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="FLEET_API_KEY"):
        ry.TaskEnv({"env_key": "tickets"})


def test_a_missing_env_key_fails_at_construction(monkeypatch):
    """E5"""
    monkeypatch.setenv("FLEET_API_KEY", "k")
    for config in ({}, {"env_key": ""}, {"env_key": None, "prompt": "x"}):
        with pytest.raises(ConfigError, match="env_key"):
            ry.TaskEnv(config)


async def test_construction_does_no_io(server):
    """E5"""
    tasks, threads = asyncio.all_tasks(), threading.active_count()
    env = env_of(server)
    assert (asyncio.all_tasks(), threading.active_count()) == (tasks, threads), "something could still ask"
    assert server.seen.requests == [] and env.state["instance_id"] is None
    await env.close()
    assert server.seen.requests == [], "nor does closing one that was never used"


def test_versions_travel_with_their_keys_and_tasks_come_from_files(tmp_path):
    """E5: versioned env and data (`key:version`), JSON task config, from_json_file"""
    config = TaskConfig.read({"env_key": "fira:1.3.1", "data_key": "small:v2", "note": "kept"})
    assert (config.env_key, config.env_version) == ("fira", "1.3.1")
    assert (config.data_key, config.data_version) == ("small", "v2")
    assert config.extra == {"note": "kept"}
    with pytest.raises(ConfigError, match="version"):
        TaskConfig.read({"env_key": "fira:1", "env_version": "2"})
    assert TaskConfig.from_json_file(TASKS, "count-open").prompt.startswith("How many")
    with pytest.raises(UnknownName, match="close-printer"):
        TaskConfig.from_json_file(TASKS, "close-print")
    with pytest.raises(ConfigError, match="2 tasks"):
        TaskConfig.from_json_file(TASKS)
    (tmp_path / "one.json").write_text(
        json.dumps({"env_id": "a", "version": "1", "key": "k", "verifier_func": "def f(e): ..."})
    )
    one = TaskConfig.from_json_file(tmp_path / "one.json")
    assert (one.env_key, one.env_version, one.task_key, one.verifier_code) == ("a", "1", "k", "def f(e): ...")
    with pytest.raises(UnknownName, match="tool_use"):
        TaskConfig.read({"env_key": "a", "task_modality": "telepathy"})
    with pytest.raises(ConfigError, match="prompt"):
        TaskConfig.read({"env_key": "a", "prompt": 7})


# E5: an episode


async def test_an_episode_from_the_prompt_to_the_reward(server):
    """E5: prompt in the first observation, tools fetched once and cached, verifier at the end, provisioning at first reset"""
    env = env_of(server)
    first = await env.reset()
    assert first.reward is None and not first.done
    assert first.observation["prompt"].startswith("Close the ticket")
    assert first.observation["task_key"] == "close-printer" and first.observation["modality"] == "tool_use"
    names = [tool["function"]["name"] for tool in first.observation["tools"]]
    assert names == ["list_tickets", "get_ticket", "set_state", "add_note"]
    looked = await env.step({"tool": "list_tickets", "params": {"state": "open"}})
    assert looked.reward is None and not looked.done
    assert looked.info["tool_result"][0] == {"id": 1, "title": "Printer on floor 3 is on fire", "state": "open"}
    assert "Printer" in looked.observation["observation"]
    done = await env.step({"tool": "set_state", "params": {"ticket_id": 1, "state": "closed"}, "done": True})
    assert done.terminated and not done.truncated and done.reward == 1.0
    assert done.info["done_reason"] == "done" and done.info["reward_computed"] and done.info["step"] == 2
    with pytest.raises(EnvError, match="reset"):
        await env.step({"done": True})
    again = await env.reset()
    assert again.observation["tools"] == first.observation["tools"]
    left = await env.step({"done": True})
    assert left.reward == 0.0, "the reset put the ticket back"
    assert server.seen.count("POST /v1/env/instances") == 1, "the instance is used again"
    asked = (await server.places.find(env.state["instance_id"])).make
    assert (asked.env_key, asked.env_version) == ("tickets", "v1.0.0"), "the SDK puts the letter there"
    assert (asked.data_key, asked.data_version, asked.image_type) == ("default", "v1", None)
    assert asked.ttl_seconds == 3600
    await env.close()
    assert await server.left() == []


async def test_tools_are_listed_and_waited_for_once_for_an_instance(server):
    """E5 (cached), E14: first-call waits happen once per instance, not per reset"""
    env = env_of(server)
    await env.reset()
    asked = len(server.seen.requests)
    await env.reset()
    await env.reset()
    since = server.seen.requests[asked:]
    assert len(since) == 2 and all(line.endswith("/reset") for line in since), (
        "each reset is one request to the manager"
    )
    await env.close()


async def test_the_last_step_allowed_ends_the_episode_with_a_reward(server):
    env = env_of(server, limits=TaskLimits(max_steps=2))
    await env.reset()
    assert not (await env.step({"tool": "list_tickets"})).done
    last = await env.step({"tool": "list_tickets"})
    assert last.truncated and not last.terminated and last.reward == 0.0 and last.info["done_reason"] == "max_steps"
    await env.close()


async def test_the_blocking_facade_works_inside_a_running_loop(server):
    """E5: sync and async from one implementation; blocking calls also work inside a running loop"""
    provider = FleetProvider(KEY, server.url)

    def used():
        async def inside():
            """A notebook's cell: there is a loop, and it blocks."""
            with sync.TaskEnv.from_json_file(TASKS, "close-printer", provider=provider) as env:
                assert env.reset().observation["prompt"]
                assert env.query_db("SELECT count(*) FROM tickets").rows == [[5]]
                env.step({"tool": "set_state", "params": {"ticket_id": 1, "state": "closed"}})
            env.close()
            return env.final_reward

        return asyncio.run(inside())

    assert await asyncio.to_thread(used) == 1.0
    assert await server.left() == []


async def test_a_remote_task_is_served_like_any_environment(server):
    """A trainer elsewhere drives it over HTTP and WebSocket."""
    from tests.envs.conftest import served

    async with served(lambda: env_of(server)) as url:
        async with ry.envs.connect(url) as remote:
            first = await remote.reset(seed=2)
            assert first.observation["prompt"].startswith("Close the ticket")
            (printer,) = [
                row["id"]
                for row in (await remote.step({"tool": "list_tickets"})).info["tool_result"]
                if "Printer" in row["title"]
            ]
            assert printer == 4, "the seed went all the way"
            done = await remote.step(
                {"tool": "set_state", "params": {"ticket_id": printer, "state": "closed"}, "done": True}
            )
            assert done.reward == 1.0 and done.terminated
    assert await server.left() == [], "the session's end released it"


async def test_without_the_sdk_the_error_says_what_to_install(monkeypatch):
    """E2: pip extra"""
    monkeypatch.setitem(sys.modules, "fleet", None)
    env = ry.TaskEnv({"env_key": "tickets"}, api_key="k", base_url="http://127.0.0.1:9")
    with pytest.raises(MissingExtra, match=r"pip install 'rollyard\[fleet\]'"):
        await env.reset()
    await env.close()


# E6: the verifier


async def test_verifier_code_or_verifier_func_judge_the_real_instance(server):
    """E6"""
    for field in ("verifier_code", "verifier_func"):
        env = env_with(
            server, **{field: "def any_name(env, final_answer=None):\n    print('looked')\n    return 0.5\n"}
        )
        await env.reset()
        done = await env.step({"done": True})
        assert done.reward == 0.5
        assert env.feedback.verifier_stdout == "looked\n" and env.feedback.verifier_error is None
        await env.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "task t has no verifier"),
        ("def check(env):\n    raise ValueError('odd')\n", "ValueError: odd at line 2"),
        ("def check(env:\n", "SyntaxError"),
        ("def check(env):\n    return 'yes'\n", "no score"),
    ],
)
async def test_a_verifier_that_does_not_run_gives_none_never_0(server, code, words):
    """E6: no verifier, exception, syntax error, something that is no score"""
    env = env_with(server, verifier_code=code)
    await env.reset()
    done = await env.step({"done": True})
    assert done.reward is None and done.terminated and done.info["reward_computed"]
    assert words in env.feedback.verifier_error
    await env.close()
    assert env.final_reward is None


class Standing:
    """A provider whose instances are nothing but their names; `failing` are errors that come first."""

    name = "standing"
    tools_key = None

    def __init__(self, *failing, urls=("http://127.0.0.1:9/mcp",), reset_error=None):
        self.failing, self.urls, self.reset_error = list(failing), urls, reset_error
        self.made, self.closed, self.seeds, self.requests = [], [], [], []

    async def make(self, request):
        self.requests.append(request)
        if self.failing:
            raise self.failing.pop(0)
        owner = self

        class Instance:
            id = f"standing-{len(owner.made)}"
            tool_urls = owner.urls
            page_url = None
            databases = None

            async def reset(self, *, seed, timeout_s):
                owner.seeds.append((seed, timeout_s))
                if owner.reset_error:
                    raise owner.reset_error

            async def close(self):
                owner.closed.append(self.id)

        owner.made.append(Instance.id)
        return Instance()

    async def aclose(self):
        return None


async def test_without_an_instance_there_is_no_verdict():
    """E6"""

    async def refuses(check, databases):
        raise EnvError("it is closing time")

    called, go = asyncio.Event(), asyncio.Event()

    @ry.tools.tool
    async def wait() -> str:
        """Waits."""
        called.set()
        await go.wait()
        return "late"

    async with standing_env(refuses, tools=[wait]) as (env, _):
        await env.reset()
        last = asyncio.create_task(env.step({"tool": "wait", "done": True}))
        await called.wait()
        await env.close()
        go.set()
        assert (await last).reward is None and "no instance" in env.feedback.verifier_error


# E7: partial reward


@pytest.mark.slow
async def test_partial_reward_is_off_by_default_and_for_failed_runs_only(server):
    """E7"""
    async with env_of(server) as env:
        for partial_reward, closed, reward in ((False, False, 0.0), (True, False, 0.5), (True, True, 1.0)):
            env.partial_reward = partial_reward
            await env.reset()
            if closed:
                await env.step({"tool": "set_state", "params": {"ticket_id": 1, "state": "closed"}})
            assert (await env.step({"done": True})).reward == reward
    assert inspect.signature(ry.TaskEnv).parameters["partial_reward"].default is False


# E8: close


async def test_close_judges_an_episode_that_the_trainer_left(server):
    """E8: reward at close when step never computed one; a second close does nothing; the instance is released"""
    env = env_of(server)
    await env.reset()
    await env.step({"tool": "set_state", "params": {"ticket_id": 1, "state": "closed"}})
    assert env.final_reward is None
    await env.close()
    assert env.final_reward == 1.0
    assert server.seen.count("DELETE /v1/env/instances/") == 1
    await env.close()
    assert server.seen.count("DELETE /v1/env/instances/") == 1
    with pytest.raises(EnvError, match="closed"):
        await env.reset()


async def test_a_reward_that_a_step_computed_is_not_computed_again():
    """E8"""
    asked = []

    async def judge(check, databases):
        asked.append(check.final_answer)
        return Checked(score=0.25, sha256=check.sha256, seconds=0)

    async with standing_env(judge) as (env, _):
        await env.reset()
        await env.step({"done": True})
        await env.close()
    assert asked == [None] and env.final_reward == 0.25


async def test_the_instance_is_released_even_if_the_verifier_raises():
    """E8: both for errors of ours, which are told, and for any other, which is the caller's to see"""

    async def refused(check, databases):
        raise EnvUnavailable("no sandbox to be had")

    async def broken(check, databases):
        raise ZeroDivisionError

    async with standing_env(refused) as (env, provider):
        await env.reset()
        await env.close()
        assert env.final_reward is None and "no sandbox to be had" in env.feedback.verifier_error
        assert provider.closed == ["standing-0"]
    async with standing_env(broken) as (env, provider):
        await env.reset()
        with pytest.raises(ZeroDivisionError):
            await env.close()
        assert provider.closed == ["standing-0"]


# E9: the final answer


async def test_the_synthetic_tool_takes_the_answer_to_the_verifier_and_never_to_mcp(server):
    """E9"""
    env = env_of(server, "count-open")
    tools = (await env.reset()).observation["tools"]
    assert tools[-1]["function"]["name"] == "submit_final_answer"
    calls = len(server.seen.requests)
    done = await env.step({"tool": "submit_final_answer", "params": {"answer": "There are 3."}})
    assert done.terminated and done.reward == 1.0
    assert done.info["submitted_answer"] == "There are 3." and done.info["done_reason"] == "submitted"
    assert not [line for line in server.seen.requests[calls:] if line.endswith("/mcp")]
    await env.close()


async def test_the_synthetic_tool_exists_only_where_the_prompt_names_it(server):
    """E9"""
    env = env_of(server, "close-printer")
    assert "submit_final_answer" not in str((await env.reset()).observation["tools"])
    told = await env.step({"tool": "submit_final_answer", "params": {"answer": "x"}})
    assert not told.done and "no tool named 'submit_final_answer'" in told.info["tool_error"]
    await env.close()


# E12: feedback


async def test_feedback_holds_tool_errors_and_the_verifiers_words_and_is_cleared_between_episodes(server):
    """E12"""
    env = env_of(server)
    await env.reset()
    wrong = await env.step({"tool": "get_ticket", "params": {"ticket_id": 99}})
    assert wrong.info["tool_error"] == "there is no ticket 99"
    assert wrong.observation["observation"] == "error: there is no ticket 99"
    unknown = await env.step({"tool": "no_such_tool"})
    assert "known: list_tickets" in unknown.info["tool_error"]
    await env.step({"done": True})
    feedback = env.feedback
    assert feedback.tool_errors[0] == "there is no ticket 99" and len(feedback.tool_errors) == 2
    assert "SUCCESS_ACCUMULATOR" in feedback.verifier_stdout and feedback.verifier_error is None
    await env.reset()
    assert env.feedback.tool_errors == () and env.feedback.verifier_stdout == "" and env.final_reward is None
    await env.close()


# E13: databases


@pytest.mark.slow
async def test_databases_are_described_and_queried_async_and_blocking(server):
    """E13"""
    env = env_of(server)
    with pytest.raises(EnvError, match="reset"):
        await env.query_db("SELECT 1")
    await env.reset()
    assert [table.name for table in await env.describe_db()] == ["notes", "tickets"]
    assert [table.name for table in await env.describe_db("seed")] == ["notes", "tickets"]
    rows = await env.query_db("SELECT title FROM tickets WHERE id = ?", (2,))
    assert rows.columns == ["title"] and rows.rows == [["Cannot log in since Monday"]]
    assert (await env.query_db("SELECT * FROM tickets", max_rows=2)).truncated
    with pytest.raises(EnvError, match="readonly"):
        await env.query_db("DELETE FROM tickets")
    assert (await env.query_db("UPDATE tickets SET owner = 'me'", read_only=False)).rows_affected == 5
    with pytest.raises(EnvError, match="no database 'other'; known: current, seed"):
        await env.query_db("SELECT 1", name="other")
    await env.close()

    def blocking():
        with sync.TaskEnv(task(), api_key=KEY, base_url=server.url) as env:
            env.reset()
            return [t.name for t in env.describe_db()], env.query_db("SELECT count(*) FROM tickets", name="seed").rows

    assert await asyncio.to_thread(blocking) == (["notes", "tickets"], [[5]])


# E14: provisioning


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rollyard.envs"]


async def provisioned(provider, **options):
    options.setdefault("pauses_s", (0.0, 0.0))
    return await provision(provider, InstanceRequest(env_key="tickets"), Telemetry(env_key="tickets"), **options)


async def test_provisioning_is_tried_three_times_on_transient_errors(caplog):
    """E14: 2 s, then 4 s; retry events with attempt, max, error type, message, delay, env key; completed with seconds and id"""
    defaults = inspect.signature(provision).parameters
    assert defaults["attempts"].default == 3 and defaults["pauses_s"].default == (2.0, 4.0)
    caplog.set_level(logging.INFO, "rollyard.envs")
    provider = Standing(EnvUnavailable("health check"), EnvUnavailable("too busy"))
    made = await provisioned(provider, pauses_s=(0.01, 0.02))
    assert made.id == "standing-0"
    first, second, completed = lines(caplog)
    for line, attempt, delay, words in ((first, 1, 0.01, "health check"), (second, 2, 0.02, "too busy")):
        assert line.startswith("env.provisioning_retry") and "env_key=tickets" in line
        assert f"attempt={attempt} max_attempts=3 error_type=EnvUnavailable" in line
        assert f'message="{words}"' in line and f"delay_s={delay}" in line
    assert completed.startswith("env.provisioning_completed") and "env_key=tickets" in completed
    assert "seconds=" in completed and "instance_id=standing-0" in completed


async def test_provisioning_gives_up_after_three_and_says_so(caplog):
    """E14"""
    caplog.set_level(logging.INFO, "rollyard.envs")
    provider = Standing(*(EnvUnavailable(f"no {n}") for n in range(4)))
    with pytest.raises(EnvUnavailable, match="no 2"):
        await provisioned(provider)
    assert len(provider.requests) == 3
    last = lines(caplog)[-1]
    assert last.startswith("env.provisioning_failed") and "env_key=tickets" in last and 'message="no 2"' in last


async def test_an_instance_that_nobody_waits_for_any_more_is_given_back():
    """E14: a reset that is cancelled while its instance is made leaves none"""
    provider, begun, go_on = Standing(), asyncio.Event(), asyncio.Event()
    make = provider.make

    async def slowly(request):
        begun.set()
        await go_on.wait()
        return await make(request)

    provider.make = slowly
    waiting = asyncio.create_task(provisioned(provider))
    await begun.wait()
    waiting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert provider.made == ["standing-0"] and provider.closed == ["standing-0"]


async def test_permanent_errors_raise_at_once(caplog):
    """E14"""
    caplog.set_level(logging.INFO, "rollyard.envs")
    provider = Standing(EnvError("no such environment"))
    with pytest.raises(EnvError, match="no such environment"):
        await provisioned(provider)
    assert len(provider.requests) == 1
    assert [line.split()[0] for line in lines(caplog)] == ["env.provisioning_failed"]


async def test_the_blocking_path_says_the_same(server, caplog):
    """E14: from one code path"""
    caplog.set_level(logging.INFO, "rollyard.envs")
    async with env_of(server) as env:
        await env.reset()
    asynchronous = [line.split()[0] for line in lines(caplog)]
    caplog.clear()

    def blocking():
        with sync.TaskEnv.from_json_file(TASKS, "close-printer", api_key=KEY, base_url=server.url) as env:
            env.reset()

    await asyncio.to_thread(blocking)
    assert asynchronous == [line.split()[0] for line in lines(caplog)] == ["env.provisioning_completed", "env.closed"]


@pytest.mark.parametrize(
    ("status", "detail", "kind"),
    [
        (503, "temporarily unavailable", EnvUnavailable),
        (504, {"error_type": "timeout", "message": "health check"}, EnvUnavailable),
        (429, "slow down", EnvUnavailable),
        (401, "who are you", EnvError),
        (400, "Environment 'tickets' not found", EnvError),
        (403, {"error_type": "instance_limit_exceeded", "message": "instance limit"}, EnvError),
    ],
)
async def test_the_sdks_errors_are_transient_or_permanent_by_type(server, status, detail, kind):
    """E14: typed instead of text matching"""
    server.seen.refuse["POST /v1/env/instances"] = [(status, detail)]
    provider = FleetProvider(KEY, server.url, sdk_retries=0)
    with pytest.raises(EnvError) as caught:
        await provider.make(InstanceRequest(env_key="tickets"))
    assert type(caught.value) is kind, caught.value
    await provider.aclose()


async def test_a_server_that_cannot_be_reached_is_transient():
    """E14"""
    provider = FleetProvider(KEY, "http://127.0.0.1:9", sdk_retries=0)
    with pytest.raises(EnvUnavailable):
        await provider.make(InstanceRequest(env_key="tickets"))
    await provider.aclose()


async def test_a_transient_error_of_the_real_server_is_survived(server, caplog):
    """E14"""
    caplog.set_level(logging.INFO, "rollyard.envs")
    server.seen.refuse["POST /v1/env/instances"] = [(503, "temporarily")]
    async with env_of(server) as env:
        assert (await env.reset()).observation["tools"]
    assert any("provisioning_retry" in line and "delay_s=2.0" in line for line in lines(caplog))


SPANS = """
import asyncio, json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
kept, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
import rollyard as ry
from rollyard import sync
async def asynchronous():
    async with ry.TaskEnv.from_json_file(sys.argv[1], "count-open") as env:
        await env.reset()
def told():
    ours = [s for s in kept.get_finished_spans() if s.name.startswith("env.")]  # the mcp package makes its own
    spans = [[s.name, dict(s.attributes), [e.name for e in s.events]] for s in ours]
    kept.clear()
    return spans
asyncio.run(asynchronous())
first = told()
with sync.TaskEnv.from_json_file(sys.argv[1], "count-open") as env:
    env.reset()
print(json.dumps([first, told()]))
"""


async def test_spans_tell_the_same_story_async_and_blocking(server, tmp_path):
    """E14: one event vocabulary, logs and OpenTelemetry, same on both paths"""
    from tests.plane.venvs import told

    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    (tmp_path / "spans.py").write_text(SPANS)
    env = {"FLEET_API_KEY": KEY, "FLEET_BASE_URL": server.url, "PYTHONPATH": str(WORLDS.parents[1])}
    spans, blocking = await told(sys.executable, tmp_path / "spans.py", str(TASKS), env=env, timeout=240)
    assert [name for name, _, _ in spans] == ["env.provision", "env.reset", "env.verify"]
    assert [(name, events) for name, _, events in spans] == [(name, events) for name, _, events in blocking]
    assert spans[0][2] == ["env.provisioning_completed"]
    assert all(attributes["env.env_key"] == "tickets" for _, attributes, _ in spans)
    assert spans[2][1]["env.reward"] == 0.0 and len(spans[2][1]["env.sha256"]) == 64


# E15: reset


def standing_env(judge=None, request_s=21.0, **options):
    """A `RemoteTaskEnv` on a provider that makes nothing, with tools that are really served."""
    from contextlib import asynccontextmanager

    from rollyard.testing.serve import serve_app
    from rollyard.tools import Toolset, tool

    @tool
    async def look() -> str:
        """Looks."""
        return "seen"

    async def none(check, databases):
        return Checked(score=None, sha256=check.sha256, seconds=0, error="not judged")

    @asynccontextmanager
    async def made():
        toolset = Toolset(options.pop("tools", [look]))
        async with serve_app(toolset) as url:
            provider = Standing(urls=(url + "/mcp",), **options)
            config = TaskConfig.read({"env_key": "standing", "verifier_code": "def f(env): ..."})
            limits = TaskLimits(reset_s=7.0, request_s=request_s)
            yield RemoteTaskEnv(config, provider, judge or none, limits=limits), provider
        await toolset.aclose()

    return made()


async def test_a_manager_that_cannot_reset_is_a_warning_and_the_episode_goes_on(caplog):
    """E15: warning with env key and cause"""
    async with standing_env(reset_error=EnvError("the manager is tired")) as (env, provider):
        assert (await env.reset()).observation["tools"]
        (line,) = [line for line in lines(caplog) if "reset_failed" in line]
        assert "env_key=standing" in line and 'cause="the manager is tired"' in line
        assert (await env.step({"tool": "look"})).observation["observation"] == "seen"
        await env.close()


async def test_the_same_with_the_real_sdk_and_a_manager_that_answers_500(server, caplog):
    """E15"""
    async with env_of(server) as env:
        await env.reset()
        instance = env.state["instance_id"]
        server.seen.refuse[f"POST /i/{instance}/api/v1/env/reset"] = [(500, "the database is locked")]
        assert (await env.reset()).observation["tools"]
        assert env.state["instance_id"] == instance
    (line,) = [line for line in lines(caplog) if "reset_failed" in line]
    assert "env_key=tickets" in line and "the database is locked" in line


async def test_an_instance_that_is_gone_is_replaced_at_the_next_reset(server):
    async with env_of(server) as env:
        await env.reset()
        first = env.state["instance_id"]
        await server.places.close(await server.places.find(first))
        assert (await env.reset()).observation["tools"]
        assert env.state["instance_id"] not in (None, first)


async def test_no_tools_is_an_error_and_releases_the_instance():
    """E15"""
    async with standing_env(tools=[]) as (env, provider):
        with pytest.raises(EnvError, match="standing has no tools for tool_use"):
            await env.reset()
        assert provider.closed == ["standing-0"]
        await env.close()


async def test_reset_and_requests_have_timeouts_of_their_own():
    """E15"""
    assert TaskLimits().request_s == 60.0 and TaskLimits().reset_s != TaskLimits().request_s

    @ry.tools.tool
    async def wait() -> str:
        """Waits for ever."""
        await asyncio.Event().wait()
        return "never"

    async with standing_env(tools=[wait], request_s=2.0) as (env, provider):
        await env.reset(seed=3)
        assert provider.seeds == [(3, 7.0)]
        assert "did not answer within 2 s" in (await env.step({"tool": "wait"})).info["tool_error"]
        await env.close()


async def test_a_slow_manager_costs_its_own_timeout_and_not_the_episode(server, caplog):
    """E15"""
    async with env_of(server, limits=TaskLimits(reset_s=0.001)) as env:
        assert (await env.reset()).observation["tools"]
    (line,) = [line for line in lines(caplog) if "reset_failed" in line]
    assert "no answer within 0.001 s" in line


async def test_a_seed_is_forwarded_or_refused(server):
    """E15"""
    async with env_of(server) as env:
        await env.reset(seed=2)
        assert (await env.query_db("SELECT title FROM tickets WHERE id = 1")).rows == [["Please order more coffee"]]
    from rollyard.plane.compat.fleet import World, load_world

    fixed = load_world(WORLDS / "tickets")
    seedless = World(**{name: getattr(fixed, name) for name in fixed.__struct_fields__} | {"seeds": False})
    async with serving(worlds=[seedless]) as other:
        env = env_of(other)
        with pytest.raises(Unsupported, match="takes no seed"):
            await env.reset(seed=2)
        assert await other.left() == []
        await env.close()


@pytest.mark.slow
async def test_many_episodes_at_once_each_have_their_own_world(server):
    """Two dozen at a time: every reward is its own, and nothing is left."""
    provider = FleetProvider(KEY, server.url)

    async def episode(n):
        async with env_of(server, provider=provider) as env:
            await env.reset(seed=n)
            rows = (await env.step({"tool": "list_tickets"})).info["tool_result"]
            printer = next(row["id"] for row in rows if "Printer" in row["title"])
            state = "closed" if n % 2 else "waiting"
            await env.step({"tool": "set_state", "params": {"ticket_id": printer, "state": state}})
        return env.final_reward

    assert await asyncio.gather(*map(episode, range(24))) == [0.0, 1.0] * 12
    assert await server.left() == []
    await provider.aclose()
