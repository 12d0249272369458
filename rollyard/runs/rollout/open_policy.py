"""A policy from the text that names it: `upstream:URL`, `scripted:FILE`, `replay:ID` ..."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio

from rollyard import policy as policies
from rollyard.core.agent import Agent
from rollyard.core.errors import ConfigError, UpstreamError
from rollyard.core.protocols import LearnsModel, Policy
from rollyard.core.rollout import Rollout
from rollyard.policy import PolicyText
from rollyard.store import Store

_LEARN_S = 60.0  # a server that is slower is waited for by the calls


def refuse_queue(found: PolicyText) -> None:
    if found.name == "queue":
        raise ConfigError(
            "a queue is answered by a trainer, and none can reach the one of this command",
            hint="serve one with `rollyard serve gate --policy queue`, or pass policy=ry.policy.Queue() in Python",
        )


async def open_policy(text: str, *, store: Store | None = None, served: bool = False, **settings: Any) -> Policy:
    """A policy from its text; of `settings` (the model, the key) it is given those that it takes. `replay:ID` is read from the
    store that its text names, or else from `store`. A queue is for a gate that is `served`: a trainer can reach that."""
    found = PolicyText.read(text)
    if not served:
        refuse_queue(found)
    given = {name: value for name, value in settings.items() if name in found.takes}
    if found.name == "replay" and found.argument is not None:
        given["recorded"] = (await read_recording(found, store)).trajectory
    return policies.parse(text, **given)


async def learn_model(policy: Policy | None, agent: Agent) -> None:
    """What only the model server can say about a policy's settings, asked before anything opens: a template without a place
    for tools, a model whose files are not here. A server that does not answer is the rollout's failure, not the caller's."""
    if agent.calls_model and isinstance(policy, LearnsModel):
        with suppress(UpstreamError), anyio.move_on_after(_LEARN_S):
            await policy.discover()


async def read_recording(found: PolicyText, store: Store | None) -> Rollout:
    if (where := found.options.get("store")) is not None:
        async with Store.open(where, create=False) as other:
            return await _rollout(other, found.argument or "")
    if store is None:
        raise ConfigError(f"replay:{found.argument} needs the store of the recording", hint="add #store=FILE")
    return await _rollout(store, found.argument or "")


async def _rollout(store: Store, text: str) -> Rollout:
    kind, rollout_id = await store.resolve(text)
    if kind != "rollout":
        raise ConfigError(f"{text!r} is a run; replay takes one rollout", hint=f"rollyard list {text} shows them")
    return await store.get_rollout(rollout_id)


def silent_policy() -> Policy:
    """The policy of agents that call no model; it has no answer."""
    return policies.scripted({"steps": []})
