"""OpenEnv's sessions as they are without the package; `test_adapters_packages` has its own classes drive them."""

import json

import pytest

import rollyard as ry
from rollyard import sync
from rollyard.core.call import Reply, TokenText, floats
from rollyard.core.errors import ConfigError, EnvError, MissingExtra, ReplyRefused, SessionNotStarted, Unsupported
from rollyard.core.message import Message, Text
from rollyard.core.task import Task
from rollyard.runs.rollout.agent_log import AgentLog
from rollyard.runs.rollout.stages import Stages, drop_event
from rollyard.tools import mcp_extra
from rollyard.train.openenv_session import OpenEnvSession
from tests.waiting import Clock

HELLO = {"steps": [{"shell": "echo hello > out.txt"}, {"text": "done"}]}
CHECK = ['test "$(cat out.txt)" = hello']
SHELL = {"agent": "shell-agent", "sandbox": "local"}


@pytest.fixture
def make():
    """Sessions that are closed whatever happens."""
    made = []

    def session(instruction="say hello", **options):
        options = {"policy": ry.policy.scripted(HELLO), **SHELL, **options}
        hold_s = options.pop("hold_s", 3600.0)
        made.append(OpenEnvSession(Task(id="t", instruction=instruction), options, hold_s=hold_s))
        return made[-1]

    yield session
    for one in made:
        one.close()


def test_nobody_judges_before_verify_and_the_sandbox_lives_until_close(make):
    """X6"""
    held = make(setup=["mkdir seen"], verifier=lambda sandbox, rollout: 1.0)
    held.wait_prepared()
    assert held.sandbox.exists("seen") and not held.sandbox.exists("out.txt")
    held.start_agent()
    assert held.wait_for_completion(120) == 0
    assert held.rollout().verdict is None
    held.sandbox.write("out.txt", b"mine\n")
    assert held.judge().reward == held.judge().reward == 1.0
    assert held.sandbox.read("out.txt") == b"mine\n"
    assert not held.sandbox.exec("pgrep -f [s]hell_agent", timeout=30).ok, "the agent is dead once it has ended"
    sandbox = held.sandbox
    held.close()
    held.close()
    assert held.rollout().reward == 1.0
    with pytest.raises(EnvError, match="closed"):
        held.sandbox  # noqa: B018
    assert not sandbox.alive()


def test_what_fails_before_the_agent_runs_is_raised_and_leaves_nothing(make):
    held = make(setup=["echo out; echo err >&2; exit 7"])
    with pytest.raises(SessionNotStarted, match="setup command .* exited with 7") as caught:
        held.wait_prepared()
    (ran,) = caught.value.rollout.setup
    assert (ran.exit_code, ran.stdout, ran.stderr) == (7, "out\n", "err\n")
    with pytest.raises(EnvError, match="closed"):
        held.sandbox  # noqa: B018


def test_a_session_that_its_caller_forgets_is_closed_after_hold_s(make):
    held = make(hold_s=0.2)
    with pytest.raises(SessionNotStarted, match="held the rollout for more than 0.2 s"):
        held.wait_prepared()
        held.wait_started(60)
    with pytest.raises(EnvError, match="closed"):
        held.sandbox  # noqa: B018


@pytest.mark.anyio
async def test_a_pause_is_no_time_of_the_rollouts():
    clock = Clock()
    stages = Stages("ro", ry.Limits(agent=900, verify=30, total=60), drop_event, clock=clock)
    before = stages.deadline("wait").at
    async with stages.pause():
        clock.now += 5
    assert stages.deadline("wait").at == before + 5


class LogprobsAlone:
    """A server that says how likely its tokens were and not which ids they have."""

    async def __call__(self, call):
        tokens = (TokenText("do", -0.5), TokenText("ne", -0.25))
        return Reply(message=Message("assistant", (Text("done"),)), tokens=tokens, logprobs=floats([-0.5, -0.25]))

    async def closed(self, rollout_id):
        pass

    async def aclose(self):
        pass


def test_logprobs_without_ids_are_in_the_trace(make):
    held = make(policy=LogprobsAlone())
    held.start_agent()
    held.wait_for_completion(120)
    (entry,) = held.fetch_proxy_trace()
    assert entry["completion_tokens"] == ["do", "ne"]
    assert (entry["completion_token_ids"], entry["per_token_logps"]) == (None, [-0.5, -0.25])
    assert (entry["finish_reason"], entry["reward"]) == ("stop", None)
    assert entry["latency_s"] > 0 and entry["loss_mask"] is None
    assert entry["request"]["messages"][-1]["content"] == "say hello"
    assert entry["response"]["choices"][0]["message"]["content"] == "done"


def test_a_black_box_has_no_trace_and_no_calls_to_answer(make):
    held = make(agent="nop", policy=None)
    held.start_agent()
    assert held.wait_for_completion(120) == 0
    assert held.fetch_proxy_trace() == []
    with pytest.raises(ConfigError, match="interception_gate"):
        sync.wait(held.next_request())
    with pytest.raises(ConfigError, match="interception_gate"):
        held.register_tool_handler("add", handler=None)


def test_the_trainers_half_has_a_key_that_the_agent_has_not(make):
    held = make(policy=ry.policy.Queue())
    held.start_agent()
    asked = sync.wait(held.next_request(120))
    assert asked["rollout_id"] == held.id and asked["messages"][-1]["content"] == "say hello"
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["shell"]
    printed = held.sandbox.exec("cat /proc/[0-9]*/environ; cat -- ~/.* 2>/dev/null", timeout=30).stdout
    assert held.trainer.key.encode() not in printed
    sync.wait(held.deliver(asked, "done"))
    assert sync.wait(held.next_request(120)) is None
    assert held.wait_for_completion(120) == 0
    with pytest.raises(ReplyRefused, match="nobody"):
        sync.wait(held.deliver({"request_id": "nobody"}, "late"))


def test_a_tool_handler_is_refused_by_name_where_the_agent_takes_no_tools(make):
    held = make(policy=ry.policy.Queue())
    held.wait_prepared()

    async def add(arguments):
        return 3

    with pytest.raises(Unsupported, match="shell-agent"):
        held.register_tool_handler("add", add)


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.mark.slow
@pytest.mark.agent
def test_an_agent_calls_the_trainers_tool(make):
    held = make(policy=ry.policy.Queue(), agent="opencode")
    held.wait_prepared()
    given = []

    async def add(arguments):
        given.append(arguments)
        return {"sum": arguments["a"] + arguments["b"]}

    held.register_tool_handler("add", add, tool_definition=ADD)
    held.start_agent()
    with pytest.raises(ConfigError, match="has read its list of tools"):
        held.register_tool_handler("more", add)
    said = sync.wait(_answer_with_tool(held))
    assert given == [{"a": 1, "b": 2}] and '"sum":3' in said
    assert held.wait_for_completion(120) == 0


async def _answer_with_tool(held):
    said = ""
    while (asked := await held.next_request(240)) is not None:
        names = [tool["function"]["name"] for tool in asked["tools"]]
        name = next((name for name in names if name.endswith("add")), None)
        if name is None or any(message["role"] == "tool" for message in asked["messages"]):
            said += json.dumps(asked["messages"]).replace(" ", "").replace("\\", "")
            await held.deliver(asked, "done")
            continue
        call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": '{"a": 1, "b": 2}'}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        await held.deliver(asked, {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
    return said


def test_the_whole_log_is_copied_where_the_kept_one_is_cut(tmp_path):
    with (tmp_path / "log").open("w+b") as whole:
        log = AgentLog(head=4, tail=4, copy=whole)
        log.add(b"0123456789")
        log.add(b"abcdef")
        whole.seek(0)
        assert whole.read() == b"0123456789abcdef"
    assert log.read() == b"0123\n[8 bytes are left out here]\ncdef"


def test_an_older_mcp_is_named_as_what_is_missing(tmp_path):
    """OpenEnv brings `mcp` 1, which is there and is not what serves tools."""
    with pytest.raises(MissingExtra, match=r"mcp>=2.*rollyard\[mcp\]"):
        mcp_extra.require_mcp("a tool", needs=("mcp", "no_such_mcp_types"))
