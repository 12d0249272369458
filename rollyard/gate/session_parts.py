"""What a session has of its own, beyond its gate's policy: how the log keeps it, and what a restart leaves missing.

A policy that was made from a text is kept as that text, and the restarted gate opens it again. A policy or a tool that is
Python code, the recorded calls of a branch and a secret cannot be kept. Such a session answers nothing after a restart until
its program has supplied them (`Gate.supply`; a branch begins anew). Answered by another policy, or without its tools, its
rollout would look like an honest one and be something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from rollyard.core.errors import GateError
from rollyard.core.protocols import HasText, Policy, Prefix
from rollyard.net.asgi import Mounted

SECRETS = ("api_key",)  # settings that are used and never written down


class SessionIncomplete(GateError):
    """The gate was started again, and the session lacks what only its program can give it back."""

    status = 503
    code = "session_incomplete"


class OwnTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the session serves to its agent, as the log keeps it."""

    name: str
    schema: dict[str, Any] = {}


class OwnParts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`policy` is the text of the session's own policy, `policy_class` the class of one that has no text. `tools_class` is
    the application that serves its tools. `secrets` names settings."""

    policy: str | None = None
    policy_class: str | None = None
    tools_class: str | None = None
    tools: tuple[OwnTool, ...] = ()
    branch: bool = False
    secrets: tuple[str, ...] = ()


@runtime_checkable
class ListsTools(Protocol):
    """An application that knows the tools it serves, by name, each with its `schema`."""

    tools: Mapping[str, Any]


def describe_policy(policy: Policy) -> OwnParts:
    text = policy.text if isinstance(policy, HasText) else None
    return OwnParts(policy=text) if text is not None else OwnParts(policy_class=_class_name(policy))


def describe_parts(
    policy: Policy | None, tools: Mounted | None, prefix: Prefix | None, settings: Mapping[str, Any]
) -> OwnParts:
    """`policy` is None where the session is answered by the gate's."""
    own = OwnParts() if policy is None else describe_policy(policy)
    return msgspec.structs.replace(
        own,
        tools_class=None if tools is None else _class_name(tools),
        tools=list_tools(tools),
        branch=prefix is not None,
        secrets=tuple(name for name in SECRETS if settings.get(name)),
    )


def list_tools(tools: Mounted | None) -> tuple[OwnTool, ...]:
    if not isinstance(tools, ListsTools):
        return ()
    return tuple(OwnTool(name=name, schema=dict(one.schema)) for name, one in tools.tools.items())


def missing_parts(own: OwnParts) -> dict[str, str]:
    """What a restart takes from the session, each with what to do. The policy that has a text is not among it."""
    missing: dict[str, str] = {}
    if own.policy_class is not None:
        missing["policy"] = f"its policy {own.policy_class} was an object of the process that ended; supply policy="
    if own.tools_class is not None:
        names = ", ".join(tool.name for tool in own.tools) or own.tools_class
        missing["tools"] = f"its tools ({names}) ran in the process that ended; supply tools="
    if own.branch:
        missing["prefix"] = "the recorded calls it branches off were in the process that ended; branch again"
    for name in own.secrets:
        missing[name] = f"its {name} is a secret and was not written down; supply {name}="
    return missing


def changed_tools(own: OwnParts, offered: tuple[OwnTool, ...]) -> list[str]:
    """The names of tools that the agent was described otherwise."""
    before, now = ({tool.name: tool.schema for tool in tools} for tools in (own.tools, offered))
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
