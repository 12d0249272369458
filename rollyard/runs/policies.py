"""The policies that a run's config names, opened. Wherever rollouts are done, these are what answers them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

from rollyard import policy as policies
from rollyard.core.errors import ConfigError, Error
from rollyard.core.protocols import Checkable, Policy
from rollyard.runs.config import RunConfig
from rollyard.runs.plan import AGENTS_MODEL

_SERVERS = ("upstream:", "passthrough:", "tokens:")  # policies that talk to a model server


async def check_policies(policies: Mapping[str, Policy], model: str | None) -> None:
    """Ask each policy's server once whether it will answer, before anything is opened for it."""
    for name, policy in policies.items():
        if not isinstance(policy, Checkable):
            continue
        try:
            await policy.check(model or AGENTS_MODEL)
        except Error as error:
            if len(policies) > 1:
                error.message = f"policy {name!r}: {error.message}"
            raise


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
