"""Runs in an environment with Agent Lightning: its own runner runs our agent and stores the verdict as the reward."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import agentlightning as agl
from gateway import TASK, UNJUDGED, Gateway, gateway

from rollyard.core.errors import Error
from rollyard.train.plugins.agent_lightning import CliLitAgent


async def main(url):
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(agl.OtelTracer())
    agent = CliLitAgent("shell-agent")
    resources = {"main_llm": agl.LLM(endpoint=f"{url}/v1", model="m", api_key="secret")}
    with runner.run_context(agent=agent, store=store):
        good = await runner.step({"task": TASK}, resources=resources)
        try:
            await runner.step({"task": UNJUDGED}, resources=resources)
        except Error as error:
            assert "no verdict" in str(error)
        else:
            raise AssertionError("a rollout without a verdict had a reward")
    return good, agl.find_final_reward(await store.query_spans(good.rollout_id))


with gateway() as url:
    good, reward = asyncio.run(main(url))
assert (good.status, reward) == ("succeeded", 1.0), (good, reward)
assert {(key, model) for _, key, model in Gateway.asked} == {("Bearer secret", "m")}
print("ok")
