"""Runs beside a checkout of rLLM: its own caller of agent flows runs ours, and its evaluation takes the verdict."""

import asyncio
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), sys.argv[1]]

from gateway import TASK, UNJUDGED, Gateway, gateway
from rllm.types import AgentConfig, Episode, run_agent_flow

from rollyard.core.errors import Error
from rollyard.train.plugins.rllm import CliAgentFlow, verdict

flow = CliAgentFlow("shell-agent")
with gateway() as url:
    config = AgentConfig(base_url=f"{url}/sessions/s1/v1", model="m", session_uid="s1")
    episode = asyncio.run(run_agent_flow(flow, {"task": TASK}, config))
    assert isinstance(episode, Episode)
    assert episode.trajectories[0].reward == 1.0 and episode.is_correct
    assert {path for path, *_ in Gateway.asked} == {"/sessions/s1/v1/chat/completions"}
    assert verdict.evaluate({}, episode).reward == 1.0
    try:
        asyncio.run(flow.arun({"task": UNJUDGED}, config))
    except Error as error:
        assert "no verdict" in str(error)
    else:
        raise AssertionError("a rollout without a verdict had a reward")
print("ok")
