"""A task whose tools are elsewhere: its environment is made for the attempt, its tools reach the agent through the gate, and its
verifier code is the judge.

The instance is made before the sandbox and released after it, whatever happens between. The agent never learns where it is and
holds no key to it. The verifier runs when the agent is dead, in a sandbox that nothing of the agent's comes to.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import Any

import msgspec

from rollyard.core.message import Message
from rollyard.core.protocols import Sandbox
from rollyard.core.remote_task import TaskConfig
from rollyard.core.rollout import Rollout, Verdict
from rollyard.envs.browser.client import BrowserLeases
from rollyard.envs.fleet.provider import PROVISION_S
from rollyard.envs.fleet.remote_episode import RemoteEpisode
from rollyard.envs.fleet.sdk import FleetProvider
from rollyard.envs.fleet.task_env import TaskLimits
from rollyard.envs.fleet.task_instance import TaskInstance, open_instance
from rollyard.envs.fleet.verifier_code import check_in
from rollyard.envs.telemetry import Telemetry
from rollyard.runs.rollout.context import RolloutContext
from rollyard.runs.rollout.judge import Judge
from rollyard.tools import Toolset
from rollyard.tools.bridge import bridge

_LIMITS = TaskLimits()


async def open_remote(context: RolloutContext, stack: AsyncExitStack) -> RolloutContext:
    """The same rollout with the task's environment behind its tools and its judge. What is opened is closed with the stack."""
    config, plan, limits = context.task.remote, context.plan, context.limits
    if config is None:
        return context
    telemetry = Telemetry(env_key=config.env_key, task_key=config.task_key or None)
    uncounted = context.stages.pause() if limits.total is None else nullcontext()  # the stages' sum has no share for it
    bound = f"limits.boot + {PROVISION_S:g} s for the instance"
    async with uncounted, context.stages.stage("provision", limit_s=limits.boot + PROVISION_S, limit_name=bound):
        task_instance = await _open_instance(context, config, telemetry, stack)
        await task_instance.begin(telemetry, seed=None, timeout_s=_LIMITS.reset_s)
        await task_instance.show_page()
        await context.stages.tell("env.opened", env_key=config.env_key, instance_id=task_instance.instance.id)
        episode = RemoteEpisode(config, task_instance, telemetry, partial_reward=config.partial_reward)
        tools = context.session.tools or Toolset(())
        stack.push_async_callback(tools.aclose)
        for spec in episode.specs:
            tools.add(bridge(spec, episode.use, timeout_s=_LIMITS.request_s))
        await tools.ready()
    judge = Judge(context.backend, context.provision, plan.verifier or _Verifier(episode), context.gate.policy)
    return context._replace(judge=judge, session=msgspec.structs.replace(context.session, tools=tools))


async def _open_instance(
    context: RolloutContext, config: TaskConfig, telemetry: Telemetry, stack: AsyncExitStack
) -> TaskInstance:
    """An instance that outlives its rollout, unless the task says how long it lives."""
    plan = context.plan
    provider = plan.provider
    if provider is None:
        provider = FleetProvider()
        stack.push_async_callback(provider.aclose)
    leases = plan.leases or (BrowserLeases() if config.task_modality == "browser_use" else None)
    lasting = config.ttl_s or max(config.lifetime_s, context.limits.ttl_s)
    asked = msgspec.structs.replace(config, ttl_s=lasting)
    task_instance = await open_instance(
        asked, provider, telemetry, request_s=_LIMITS.request_s, leases=leases, run_id=plan.run_id
    )
    stack.push_async_callback(task_instance.release)
    return task_instance


class _Verifier:
    """The episode's verifier code as a `Verifier`."""

    grade = "sealed"

    def __init__(self, episode: RemoteEpisode) -> None:
        self._episode = episode

    async def __call__(self, sandbox: Sandbox, rollout: Rollout) -> Verdict:
        episode = self._episode
        await episode.verify(partial(check_in, sandbox), list(transcript(rollout)))
        if episode.reward is None:
            return Verdict(status="failed", error=episode.verifier_error, log=episode.verifier_stdout)
        return Verdict(reward=episode.reward, log=episode.verifier_stdout)


def transcript(rollout: Rollout) -> tuple[dict[str, Any], ...]:
    """The longest conversation of the rollout, as OpenAI messages."""
    branches = rollout.trajectory.branches if rollout.trajectory is not None else ()
    longest = max((branch.messages for branch in branches), key=len, default=())
    return tuple(line for message in longest for line in _lines(message))


def _lines(message: Message) -> list[dict[str, Any]]:
    if message.tool_results:
        return [
            {
                "role": "tool",
                "tool_call_id": result.call_id,
                "content": "".join(getattr(p, "text", "") for p in result.parts),
            }
            for result in message.tool_results
        ]
    line: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        line["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return [line]
