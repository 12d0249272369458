"""The policies that a run's config names, opened. Wherever rollouts are done, these are what answers them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

from rollyard import agents
from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Policy
from rollyard.policy import PolicyText
from rollyard.runs.rollout.open_policy import open_policy, refuse_queue, silent_policy
from rollyard.runs.run.config import POLICY, RunConfig
from rollyard.store import Store


def check_policies(config: RunConfig) -> None:
    """Refuse what cannot answer, before anything opens."""
    for text in config.answers.values():
        refuse_queue(PolicyText.read(text))
    callers = [name for name in config.agents if agents.get(name).calls_model]
    if callers and not config.answers:
        raise ConfigError(
            f"no policy answers the model calls of {', '.join(callers)}",
            hint="--policy scripted:FILE, or --base-url URL --model M",
        )


async def open_policies(stack: AsyncExitStack, config: RunConfig, store: Store) -> Mapping[str, Policy]:
    """Each by its name, closed with the stack. Agents that call no model need none."""
    check_policies(config)
    made: dict[str, Policy] = {}
    for name, text in config.answers.items():
        policy = made[name] = await open_policy(text, store=store, model=config.model, key_env=config.key_env)
        stack.push_async_callback(policy.aclose)
    return made or {POLICY: silent_policy()}
