"""Runs in an environment with OpenEnv: its own classes drive our sessions, with a real agent in a real sandbox."""

import json
import sys
import time
from pathlib import Path

from openenv.core.harness.rollout import (
    LoopOwningSession,
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    TrainableSession,
    VerifyResult,
)
from openenv.core.harness.training import TrainingTrace

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.train.openenv_session import SessionFactory

HELLO = {"steps": [{"shell": "echo hello > out.txt"}, {"text": "done"}]}
OPTIONS = {"agent": "shell-agent", "sandbox": "local"}


def golden(path):
    for trace in json.loads(Path(path, "openenv.json").read_text()):
        assert TrainingTrace.model_validate(trace).turns
    for entries in json.loads(Path(path, "openenv_entries.json").read_text()):
        assert TrainingTrace.from_entries(entries).turns


def session():
    check = 'test "$(cat out.txt)" = hello'
    factory = SessionFactory(policy=ry.policy.scripted(HELLO), verify=[check], **OPTIONS)
    assert isinstance(factory, ResourceSessionFactory)
    held = factory.create([{"role": "user", "content": "say hello"}], seed=1, episode_id="e1")
    for kind in (ResourceSession, LoopOwningSession, TrainableSession):
        assert isinstance(held, kind), kind
    assert held.initial_messages() == [{"role": "user", "content": "say hello"}]
    assert held.list_tools() == []
    refused = held.call_tool("sh", {"cmd": "ls"})
    assert isinstance(refused, ToolResult) and "no tool 'sh'" in refused.error
    held.start_agent()
    assert held.wait_for_completion(120) == 0
    trace = held.fetch_training_trace()
    assert isinstance(trace, TrainingTrace)
    first, second = trace.turns
    whole = first.prompt_token_ids + first.completion_token_ids
    assert second.prompt_token_ids[: len(whole)] == whole
    assert sum(first.loss_mask) == len(first.completion_token_ids)
    entries = held.fetch_proxy_trace()
    assert [e["completion_token_ids"] for e in entries] == [t.completion_token_ids for t in trace.turns]
    assert [e["reward"] for e in entries] == [1.0, 1.0]
    verdict = held.verify([])
    assert isinstance(verdict, VerifyResult) and (verdict.env_reward, verdict.done) == (1.0, True)
    assert (held.rollout().calls, held.rollout().seed, held.rollout().episode_id) == (2, 1, "e1")
    assert isinstance(held.fetch_trace(), str)
    held.close()
    held.close()


def unjudged():
    held = SessionFactory(start=False, policy=ry.policy.scripted(HELLO), **OPTIONS).create("say hello")
    try:
        held.wait_for_completion(1)
    except ConfigError as error:
        assert "not started" in str(error)
    else:
        raise AssertionError("waited for an agent that was not started")
    held.start_agent()
    held.start_agent()
    assert held.wait_for_completion(120) == 0
    assert held.rollout().calls == 2, "two starts are one agent"
    assert (held.verify([]).env_reward, held.verify([]).done) == (None, True)
    assert len(held.fetch_training_trace().turns) == 2


def closing():
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


def sleeping():
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            continue
    return any(line.startswith(b"sleep\x00613.7") for line in lines)


golden(sys.argv[1])
session()
unjudged()
closing()
print("ok")
