"""Every option acts or is refused by its name; False, 0 and "" are values, and a number that means nothing is refused."""

from __future__ import annotations

import msgspec
import pytest

import rollyard as ry
from rollyard.core.agent import Addition, Agent
from rollyard.core.call import NO_THINKING, Call, Sampling
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.task import VerifierSpec
from rollyard.runs.coding_env import CodingAction, CodingEnv
from rollyard.runs.coding_request import CodingOptions
from rollyard.runs.rollout.modes import choose
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.runs.run.config import RunConfig
from rollyard.testing.agent.fixture import Witness
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio
URL = "http://127.0.0.1:9"
BARE = Agent(name="bare", wires={"chat": Addition()})


@pytest.fixture
async def server():
    """A model server that keeps what it is asked: another gate, on loopback."""
    witness = Witness(ry.policy.scripted(HELLO), lambda rollout_id: None)
    async with ry.Gate(witness, host="127.0.0.1") as gate:
        session = await gate.open_session("server")
        yield f"{gate.url}/v1", session.key, witness


async def ask(backend, server, **options):
    """The bodies that reached the model server."""
    url, key, witness = server
    done = await ry.run_rollout(
        "x", agent="shell-agent", base_url=url, model="m", key=key, sandbox=backend, verify=CHECK, **options
    )
    assert done.failure is None, done.failure
    return [msgspec.json.decode(call.raw) for call in witness.calls]


async def test_the_seed_is_in_every_request(backend, server):
    assert [body["seed"] for body in await ask(backend, server, seed=0)] == [0, 0]


async def test_without_a_seed_none_is_sent(backend, server):
    assert all("seed" not in body for body in await ask(backend, server))


async def test_attempts_of_a_run_are_asked_for_with_seeds_of_their_own(backend, server, tmp_path):
    url, key, witness = server
    policy = ry.policy.upstream(url, model="m", key=key)
    async with ry.Store.open(str(tmp_path / "runs.db")) as store, ry.Gate(policy, log=store) as gate:
        tasks = ry.Taskset([ry.Task(id="t", instruction="x")])
        run = ry.Run(
            tasks, agent="shell-agent", attempts=2, parallel=1, seed=40, sandbox=backend, gate=gate, store=store
        )
        async with run:
            done = [rollout async for rollout in run]
    assert sorted(rollout.seed for rollout in done) == [40, 41]
    assert sorted({msgspec.json.decode(call.raw)["seed"] for call in witness.calls if call.tools}) == [40, 41]


@pytest.mark.parametrize("top", [0, 2])
async def test_the_number_of_alternatives_is_in_every_request(backend, server, top):
    bodies = await ask(backend, server, top_logprobs=top)
    assert [(body["logprobs"], body["top_logprobs"]) for body in bodies] == [(True, top)] * 2


async def test_thinking_that_the_policy_disables_can_be_allowed_again(backend, server):
    url, key, witness = server
    for value, told in ((None, True), (False, False), (True, True)):
        witness.calls.clear()
        policy = ry.policy.upstream(url, model="m", key=key, disable_thinking=True)
        done = await ry.run_rollout(
            "x", agent="shell-agent", policy=policy, sandbox=backend, disable_thinking=value, verify=CHECK
        )
        await policy.aclose()
        assert done.failure is None, done.failure
        assert ["chat_template_kwargs" in msgspec.json.decode(call.raw) for call in witness.calls] == [told] * 2


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        (lambda: ry.policy.upstream(URL, dialect="messages"), {"seed", "top_logprobs"}),
        (lambda: ry.policy.upstream(URL, dialect="responses"), {"seed"}),
        (lambda: ry.policy.upstream(URL, dialect="gemini"), set()),
        (lambda: ry.policy.upstream(URL), set()),
        (lambda: ry.policy.tokens(URL), {"disable_thinking", "top_logprobs"}),
        (lambda: ry.policy.Queue(), {"disable_thinking", "top_logprobs"}),
        (lambda: ry.policy.passthrough(URL), {"seed", "disable_thinking", "top_logprobs", "max_tokens_cap"}),
        (lambda: ry.policy.scripted(HELLO), {"disable_thinking", "top_logprobs", "max_tokens_cap"}),
        (lambda: ry.policy.scripted(lambda call: "hi"), set()),
    ],
)
async def test_what_a_policy_does_not_act_on_is_refused_by_name(policy, refused):
    given = {"seed": 0, "disable_thinking": True, "top_logprobs": 0, "max_tokens_cap": 7}
    for name, value in given.items():
        opened = policy()
        options = RolloutOptions(**{name: value})
        if name in refused:
            with pytest.raises(Unsupported, match=f"cannot honour {name}"):
                choose(options, policy=opened, agent=BARE)
        else:
            settings = choose(options, policy=opened, agent=BARE).settings
            assert settings == ({"sampling": {"seed": 0}} if name == "seed" else {name: value})


def test_what_a_trainer_is_asked_to_sample_with_has_the_sessions_options():
    options = {"sampling": {"seed": 3}, "max_tokens_cap": 5, "top_logprobs": 0, "disable_thinking": True}
    call = Call(id="c", rollout_id="r", dialect="chat", model="m", messages=(), options=options)
    assert call.wanted == Sampling(seed=3, max_tokens=5, logprobs=True, top_logprobs=0, reasoning=NO_THINKING)
    asked = msgspec.structs.replace(
        call, sampling=Sampling(max_tokens=3, temperature=0.5), options={"max_tokens_cap": 9}
    )
    assert asked.wanted == Sampling(max_tokens=3, temperature=0.5)


@pytest.mark.parametrize(
    "option", [{"max_tokens_cap": 0}, {"max_tokens_cap": -5}, {"top_logprobs": -5}, {"max_calls": -5}, {"seed": -5}]
)
def test_a_number_that_means_nothing_is_refused_by_its_name(option):
    (name,) = option
    for make in (RolloutOptions, RunConfig, CodingOptions):
        with pytest.raises(ConfigError, match=f"{name} must be at least"):
            make(**option)
    for policy in (ry.policy.upstream, ry.policy.tokens):
        if name == "max_tokens_cap":
            with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
                policy(URL, **option)


@pytest.mark.parametrize(
    "field", [{"limit": -5}, {"max_tokens": -5}, {"attempts": 0}, {"parallel": -5}, {"retries": -5}, {"max_cost": -5.0}]
)
def test_a_runs_number_that_means_nothing_is_refused_by_its_name(field):
    with pytest.raises(ConfigError, match=f"{next(iter(field))} must be at least"):
        RunConfig(**field)
    with pytest.raises(ConfigError, match=r"concurrency\.a must be at least 1"):
        RunConfig(concurrency={"a": 0})


async def test_an_environments_seed_chooses_the_task_where_calls_are_left_alone():
    judge = VerifierSpec(kind="commands", options={"commands": [CHECK]})
    tasks = [ry.Task(id=name, instruction="x", verifier=judge) for name in ("one", "two")]
    async with ry.Gate(ry.policy.scripted(HELLO), host="127.0.0.1") as server:
        key = (await server.open_session("server")).key
        options = CodingOptions(mode="black_box", base_url=f"{server.url}/v1", key=key, agent="shell-agent")
        env = CodingEnv(options, tasks)
        await env.reset(seed=1)
        done = await env.step(CodingAction())  # a seed for its calls would be refused
    assert (env.state["task_id"], done.reward) == ("two", 1.0)
