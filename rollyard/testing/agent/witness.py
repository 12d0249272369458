"""O, from the model's side: what an option says is in the request that reaches the model server, which is another gate here."""

from __future__ import annotations

from typing import Any

import msgspec

from rollyard.core.call import Call
from rollyard.core.task import Task
from rollyard.gate import Gate
from rollyard.policy import scripted
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.testing.agent.fixture import DONE, HELLO, LIMITS, WRITE, AgentFixture, AgentRun, Witness
from rollyard.testing.suite import Skip, case, check

_CAP, _SEED = 1234, 7


async def ask_server(fixture: AgentFixture, mode: str, **options: Any) -> AgentRun:
    """The agent once on a model server that keeps what it is asked."""
    witness = Witness(scripted(fixture.script(WRITE, DONE)), lambda rollout_id: None)
    async with Gate(witness, host="127.0.0.1") as server:
        session = await server.open_session("server")
        task = Task(id="conformance", instruction="Write hello into out.txt.", user=fixture.user)
        done = await run_rollout(
            task,
            agent=fixture.agent,
            sandbox=fixture.backend,
            mode=mode,
            model="served",
            base_url=server.url if mode == "black_box" else f"{server.url}/v1",
            key=session.key,
            provision=fixture.provision,
            verify=[HELLO],
            limits=LIMITS,
            **options,
        )
    return AgentRun(done, [call for call in witness.calls if call.kind == "agent"], witness.replies)


def _thinks(call: Call) -> bool:
    reasoning = msgspec.json.decode(call.sampling.reasoning) if call.sampling.reasoning else {}
    return bool(reasoning.get("enabled") or reasoning.get("display") or reasoning.get("budget"))


@case("O5", "offers the tools that it lists, and none that is disabled", needs=("model", "disabled_tools"), timeout=600)
async def disabled_tools(fixture: AgentFixture) -> None:
    plain = await fixture.run()
    plain.check_solved()
    offered = {tool.name for call in plain.calls if call.kind == "agent" for tool in call.tools}
    listed = set(fixture.agent.tools)
    check(listed == offered, f"only listed: {sorted(listed - offered)}; only offered: {sorted(offered - listed)}")
    used = {use.name for reply in plain.replies for use in reply.message.tool_calls}
    # those that edit come last: without its editor qwen-code refuses shell commands that write files as well
    if not (spare := sorted(offered - used, key=lambda name: ("edit" in name or "write" in name, name))):
        raise Skip("it has no tool to spare")
    seen = await fixture.run(disabled_tools=spare[:2])
    seen.check_solved()
    left = {tool.name for call in seen.calls if call.kind == "agent" for tool in call.tools}
    check(not left & set(spare[:2]), f"still offered: {sorted(left & set(spare[:2]))}")
    check(used <= left, f"no longer offered: {sorted(used - left)}")


@case(
    "O6",
    "has seed, tokens, thinking and logprobs set by the gate in what the model is asked",
    needs=("model",),
    timeout=600,
)
async def gate_options(fixture: AgentFixture) -> None:
    options = {"seed": _SEED, "max_tokens_cap": _CAP, "disable_thinking": True, "top_logprobs": 3}
    seen = await ask_server(fixture, "transparent_proxy", **options)
    seen.check_solved()
    for call in seen.calls:
        body = msgspec.json.decode(call.raw)
        check(call.sampling.seed == _SEED, f"the seed that was sent is {call.sampling.seed}")
        check(call.sampling.max_tokens == _CAP, f"{call.sampling.max_tokens} tokens were asked for")
        check(call.sampling.top_logprobs == 3, f"{call.sampling.top_logprobs} alternatives were asked for")
        template = body.get("chat_template_kwargs") or {}
        check(template.get("enable_thinking") is False, f"thinking was left on: {template}")


@case("O7", "sets tokens itself where its calls are left alone", needs=("model", "max_tokens"), timeout=600)
async def own_max_tokens(fixture: AgentFixture) -> None:
    seen = await ask_server(fixture, "black_box", max_tokens_cap=_CAP)
    seen.check_solved()
    limits = {call.sampling.max_tokens for call in seen.calls}
    check(limits == {_CAP}, f"it asked for {limits} tokens")


@case("O8", "stops thinking itself where its calls are left alone", needs=("model", "disable_thinking"), timeout=600)
async def own_thinking(fixture: AgentFixture) -> None:
    plain, seen = await ask_server(fixture, "black_box"), await ask_server(fixture, "black_box", disable_thinking=True)
    seen.check_solved()
    before, after = ({call.sampling.reasoning for call in one.calls} for one in (plain, seen))
    check(not any(_thinks(call) for call in seen.calls), f"it asked for thinking: {after}")
    check(before != after, f"it asks for the same thinking with and without the option: {after}")
