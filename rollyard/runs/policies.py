"""The policies that a run's config names, opened. Wherever rollouts are done, these are what answers them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

from rollyard import policy as policies
from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Policy
from rollyard.runs.config import RunConfig

_SERVERS = ("upstream:", "passthrough:", "tokens:")  # policies that talk to a model server


def open_policies(stack: AsyncExitStack, config: RunConfig) -> Mapping[str, Policy]:
    """Each by its name, closed with the stack."""
    if not config.policies:
        raise ConfigError("nobody answers the model calls", hint="--policy scripted:FILE, or --base-url URL --model M")
    made: dict[str, Policy] = {}
    for name, text in config.policies.items():
        settings = {"model": config.model, "key_env": config.key_env} if text.startswith(_SERVERS) else {}
        policy = made[name] = policies.parse(text, **settings)
        stack.push_async_callback(policy.aclose)
    return made
