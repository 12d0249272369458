"""Runs in an environment with OpenEnv: its own classes drive our sessions, with a real agent in a real sandbox. The first word
names the part to run."""

import asyncio
import json
import sys
import time
from pathlib import Path

from openenv.core.harness.rollout import (
    CLIHarnessAdapter,
    HarnessAdapter,
    HarnessRunLimits,
    LoopOwningSession,
    ModelStepResult,
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    TrainableSession,
    VerifyResult,
    build_harness_rollout_func,
)
from openenv.core.harness.training import TrainingTrace
from openenv.core.llm_client import LLMResponse, ToolCall

import rollyard as ry
from rollyard.core.errors import ConfigError, EnvError, SessionNotStarted
from rollyard.train.openenv_harness import RolloutHarness
from rollyard.train.openenv_session import SessionFactory

HELLO = {"steps": [{"shell": "echo hello > out.txt"}, {"text": "done"}]}
CHECK = 'test "$(cat out.txt)" = hello'
OPTIONS = {"agent": sys.argv[3] if len(sys.argv) > 3 else "shell-agent", "sandbox": "local"}
SHELLS = ("shell", "bash")
FIELDS = [
    "request",
    "response",
    "completion_tokens",
    "completion_token_ids",
    "per_token_logps",
    "finish_reason",
    "latency_s",
]


def golden(path):
    for trace in json.loads(Path(path, "openenv.json").read_text()):
        assert TrainingTrace.model_validate(trace).turns
    for entries in json.loads(Path(path, "openenv_entries.json").read_text()):
        assert TrainingTrace.from_entries(entries).turns


def session(path):
    factory = SessionFactory(policy=ry.policy.scripted(HELLO), verify=[CHECK], **OPTIONS)
    assert isinstance(factory, ResourceSessionFactory)
    held = factory.create([{"role": "user", "content": "say hello"}], seed=1, episode_id="e1")
    for kind in (ResourceSession, LoopOwningSession, TrainableSession):
        assert isinstance(held, kind), kind
    assert held.sandbox.exec("true", timeout=30).ok, "create returned and the sandbox is not up"
    assert held.initial_messages() == [{"role": "user", "content": "say hello"}]
    assert held.list_tools() == []
    refused = held.call_tool("sh", {"cmd": "ls"})
    assert isinstance(refused, ToolResult) and "no tool 'sh'" in refused.error
    held.start_agent()
    assert held.wait_for_completion(240) == 0
    assert held.rollout().verdict is None, "judged before verify"
    assert held.sandbox.read("out.txt") == b"hello\n"
    trace = held.fetch_training_trace()
    assert isinstance(trace, TrainingTrace)
    first, second = trace.turns
    whole = first.prompt_token_ids + first.completion_token_ids
    assert second.prompt_token_ids[: len(whole)] == whole
    assert sum(first.loss_mask) == len(first.completion_token_ids)
    entries = held.fetch_proxy_trace()
    assert [e["completion_token_ids"] for e in entries] == [t.completion_token_ids for t in trace.turns]
    assert all(set(FIELDS) <= set(e) for e in entries) and [e["reward"] for e in entries] == [None, None]
    verdict = held.verify([])
    assert isinstance(verdict, VerifyResult) and (verdict.env_reward, verdict.done) == (1.0, True)
    assert [e["reward"] for e in held.fetch_proxy_trace()] == [1.0, 1.0]
    assert held.sandbox.exec("true", timeout=30).ok, "closed before close"
    assert (held.rollout().calls, held.rollout().seed, held.rollout().episode_id) == (2, 1, "e1")
    assert held.fetch_trace().encode() == held.rollout().log
    held.close()
    held.close()
    assert held.verify([]).env_reward == 1.0
    try:
        held.sandbox  # noqa: B018
    except EnvError as error:
        assert "closed" in str(error)
    else:
        raise AssertionError("the sandbox of a closed session")


def failing(path):
    """`create` raises what failed."""
    cases = {
        "unknown mode 'sideways'": {"mode": "sideways"},
        "setup command 'exit 7' exited with 7": {"setup": ["exit 7"]},
        "agent_setup command 'exit 9' exited with 9": {"agent_setup": ["exit 9"]},
    }
    for message, options in cases.items():
        try:
            SessionFactory(policy=ry.policy.scripted(HELLO), **OPTIONS, **options).create("say hello")
        except (ConfigError, SessionNotStarted) as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"created all the same: {message}")


def unjudged(path):
    held = SessionFactory(start=False, policy=ry.policy.scripted(HELLO), **OPTIONS).create("say hello")
    try:
        held.wait_for_completion(1)
    except ConfigError as error:
        assert "not started" in str(error)
    else:
        raise AssertionError("waited for an agent that was not started")
    held.start_agent()
    held.start_agent()
    assert held.wait_for_completion(240) == 0
    assert held.rollout().calls == 2, "two starts are one agent"
    assert (held.verify([]).env_reward, held.verify([]).done) == (None, True)
    assert len(held.fetch_training_trace().turns) == 2
    held.close()


def closing(path):
    stuck = {"steps": [{"shell": "sleep 613.7"}, {"text": "done"}]}
    held = SessionFactory(policy=ry.policy.scripted(stuck), **OPTIONS).create("wait")
    deadline = time.monotonic() + 90
    while not sleeping() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sleeping(), "the agent never came to its command"
    try:
        held.wait_for_completion(0.1)
    except TimeoutError:
        pass
    held.close()
    assert not sleeping()
    try:
        held.verify([])
    except EnvError as error:
        assert "closed before it was judged" in str(error)
    else:
        raise AssertionError("judged after close")


def sleeping():
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            continue
    return any(line.startswith(b"sleep\x00613.7") for line in lines)


def intercepted(path):
    """The trainer answers, on a loop of its own; a black box has nothing to answer."""
    factory = SessionFactory(mode="interception_gate", verify=[CHECK], **OPTIONS)
    held = factory.create("say hello")
    assert held.trainer.key and held.trainer.url.startswith("http://127.0.0.1:")
    asyncio.run(answer(held))
    assert held.wait_for_completion(60) == 0
    assert held.verify([]).env_reward == 1.0
    held.close()
    plain = SessionFactory(policy=ry.policy.scripted(HELLO), **OPTIONS).create("say hello")
    try:
        asyncio.run(plain.next_request())
    except ConfigError as error:
        assert "interception_gate" in str(error)
    else:
        raise AssertionError("a call was held in another mode")
    finally:
        plain.close()


async def answer(held):
    first = await held.next_request(120)
    tool = next(tool["function"] for tool in first["tools"] if tool["function"]["name"] in SHELLS)
    name, argument = tool["name"], next(iter(tool["parameters"]["properties"]))
    assert first["messages"][-1]["role"] == "user" and first["body"]["messages"]
    call = {"name": name, "arguments": json.dumps({argument: "echo hello > out.txt"})}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
    await held.deliver(first, {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
    await held.deliver(await held.next_request(120), "done")
    assert await held.next_request(120) is None


def harness(path):
    """Their rollout function, their adapter protocol: the trainer samples each of the agent's calls."""
    factory = SessionFactory(mode="interception_gate", verify=[CHECK], **OPTIONS)
    adapter = RolloutHarness()
    assert isinstance(adapter, HarnessAdapter)
    turns = iter([[10, 11], [12, 13, 14]])

    def model_step(messages, tools, sampling):
        assert sampling == {"temperature": 0.5}
        ids = next(turns)
        shell = next(tool for tool in tools if tool.name in SHELLS)
        argument = next(iter(shell.input_schema["properties"]))
        calls = [] if len(ids) == 3 else [ToolCall("c1", shell.name, {argument: "echo hello > out.txt"})]
        return ModelStepResult(LLMResponse("", calls) if calls else LLMResponse("done"), [1, 2], ids, [-0.5] * len(ids))

    limits = HarnessRunLimits(sampling={"temperature": 0.5})
    func = build_harness_rollout_func(
        session_factory=factory, harness_adapter=adapter, model_step_builder=lambda *_: model_step, limits=limits
    )
    made = func(["say hello"], None)
    assert made["env_reward"] == [1.0] and made["completion_ids"] == [[10, 11, 12, 13, 14]], made
    cut = factory.create("say hello")
    turns = iter([[10, 11]])
    result = adapter.run_white_box(model_step, cut, HarnessRunLimits(max_turns=1, sampling={"temperature": 0.5}))
    assert result.metrics["truncated"] and result.metrics["turns"] == 1
    assert cut.verify([]).env_reward == 1.0
    cut.close()
    black = SessionFactory(policy=ry.policy.scripted(HELLO), verify=[CHECK], **OPTIONS).create("say hello")
    ran = CLIHarnessAdapter(lambda bridge, held, limits: adapter.run_black_box(held)).run_black_box(black)
    assert ran.done and ran.metrics["tool_calls"] == 1 and black.verify([]).env_reward == 1.0
    black.close()


PARTS = (golden, session, failing, unjudged, closing, intercepted, harness)
for part in PARTS:
    if sys.argv[2] in ("all", part.__name__):
        part(sys.argv[1])
print("ok")
