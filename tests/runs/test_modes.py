"""The three modes with a real agent, and every option in every mode: it takes effect or is refused by name (K1, T8)."""

from __future__ import annotations

import pytest

import rollyard as ry
from rollyard import agents
from rollyard.core.agent import Addition, Agent
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.rollout import MODES
from rollyard.core.task import McpServer
from rollyard.runs.rollout.modes import HONOURED, choose
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.runs.rollout.plan import AgentSwitches
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server():
    """A model server that answers by script: another gate, on loopback, with a key of its own."""
    async with ry.Gate(ry.policy.scripted(HELLO), host="127.0.0.1") as gate:
        session = await gate.open_session("server")
        yield gate.url, session


@pytest.mark.agent
@pytest.mark.parametrize("agent", ["shell-agent", "codex", pytest.param("claude-code", marks=pytest.mark.slow)])
async def test_black_box_passes_calls_through_untouched_and_records_only_that_they_happened(agent, backend, server):
    url, session = server
    done = await ry.run_rollout(
        "x", agent=agent, mode="black_box", base_url=f"{url}/v1", key=session.key, sandbox=backend, verify=[CHECK]
    )
    assert done.failure is None, (done.failure, done.log_tail)
    assert (done.mode, done.reward, done.calls) == ("black_box", 1.0, 2)
    assert done.turns == []
    assert session.calls == 2
    assert session.key not in str(done)


@pytest.mark.agent
async def test_a_transparent_proxy_relays_to_an_upstream_and_records_everything(backend, server):
    url, session = server
    done = await ry.run_rollout(
        "x", agent="codex", base_url=f"{url}/v1", model="served", key=session.key, sandbox=backend, verify=[CHECK],
        max_tokens_cap=500,
    )  # fmt: skip
    assert done.failure is None, (done.failure, done.log_tail)
    assert (done.mode, done.reward) == ("transparent_proxy", 1.0)
    assert [turn.finish_reason for turn in done.turns] == ["tool_calls", "stop"]
    assert session.calls == 2
    assert session.key not in str(done)


async def test_direct_gives_the_agent_the_address_and_key_and_opens_that_host_alone(backend, server):
    url, session = server
    options = {
        "agent": "shell-agent",
        "mode": "black_box",
        "base_url": f"{url}/v1",
        "key": session.key,
        "sandbox": backend,
    }
    done = await ry.run_rollout("x", direct=True, verify=[CHECK], **options)
    assert (done.reward, done.calls) == (1.0, 0)
    assert session.calls == 4  # two of the agent's, and one token before the start and one after the end
    with pytest.raises(ConfigError, match="black_box"):
        await ry.run_rollout("x", direct=True, agent="shell-agent", base_url=url, sandbox=backend)


def agent_with(*switches):
    return Agent(name="a", wires={"chat": Addition()}, options=dict.fromkeys(switches, Addition()))


def choose_with(mode, agent=None, **options):
    if mode == "interception_gate":
        return choose(RolloutOptions(mode=mode, **options), policy=ry.policy.Queue(), agent=agent)
    return choose(RolloutOptions(mode=mode, base_url="http://127.0.0.1:9/v1", **options), agent=agent)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("option", "value"), [("disable_thinking", True), ("max_tokens_cap", 5), ("top_logprobs", 2)])
def test_each_call_option_in_each_mode_takes_effect_or_is_refused_by_name(mode, option, value):
    if option in HONOURED[mode]:
        assert choose_with(mode, **{option: value}).settings[option] == value
    else:
        with pytest.raises(Unsupported, match=option):
            choose_with(mode, **{option: value})
    assert option not in choose_with(mode).settings


SERVER = (McpServer(name="m", transport="http", url="http://127.0.0.1:1/mcp"),)
OPTIONS = {"system_prompt": "be brief", "disabled_tools": ("bash",), "mcp": SERVER}


@pytest.mark.parametrize("agent", agents.names())
@pytest.mark.parametrize("option", OPTIONS)
async def test_each_agent_option_with_each_agent_takes_effect_or_is_refused_by_name(agent, option, backend):
    chosen = agents.get(agent)
    honoured = option in chosen.switches
    if honoured:
        agents.refuse(chosen, {option: chosen.tools[:1] if option == "disabled_tools" else OPTIONS[option]})
        return
    with pytest.raises(Unsupported, match=f"{agent}.*|.*MCP.*"):
        await ry.run_rollout(
            "x", agent=agent, policy=ry.policy.scripted(HELLO), sandbox=backend, labels={"drill": "options"},
            **{option: OPTIONS[option]},
        )  # fmt: skip
    assert await backend.list({"drill": "options"}) == []


def test_an_option_that_a_mode_leaves_alone_is_the_agents_when_it_can():
    given = {"disable_thinking": True, "max_tokens_cap": 5}
    left = choose_with("black_box", agent_with("disable_thinking", "max_tokens"), **given)
    assert (left.settings, left.switches) == ({}, AgentSwitches(disable_thinking=True, max_tokens=5))
    with pytest.raises(Unsupported, match="max_tokens_cap"):
        choose_with("black_box", agent_with("disable_thinking"), **given)
    both = choose_with("transparent_proxy", agent_with("max_tokens"), max_tokens_cap=5)
    assert (both.settings, both.switches) == ({"max_tokens_cap": 5}, AgentSwitches())
