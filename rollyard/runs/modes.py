"""A mode is a choice of policy, not a second code path.

`black_box`: calls pass through to `base_url` untouched; that a call happened is recorded, its content is not.
`transparent_proxy`: the gate relays to an upstream and records everything.
`interception_gate`: the gate holds each call until the trainer answers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard import policy as policies
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.protocols import Passthrough, Policy
from rollyard.core.rollout import Mode
from rollyard.runs.plan import check_mode

# what each mode can do to a model call; anything else asked for is refused by name
HONOURED: dict[Mode, frozenset[str]] = {
    "black_box": frozenset(),
    "transparent_proxy": frozenset({"disable_thinking", "max_tokens_cap", "top_logprobs", "sampling"}),
    "interception_gate": frozenset({"max_tokens_cap"}),
}


class Answering(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers the calls of a rollout, in which mode, with which session settings."""

    mode: Mode
    policy: Policy
    settings: Mapping[str, Any] = {}
    owned: bool = False  # made here, so closed here


def choose(
    mode: str | None,
    *,
    policy: Policy | str | None = None,
    base_url: str | None = None,
    model: str | None = None,
    key: str | None = None,
    calls_nobody: bool = False,
    **options: Any,
) -> Answering:
    """`policy` wins over `base_url`; without a mode the policy says which it is. An agent that `calls_nobody` (`oracle`,
    `nop`) needs neither."""
    asked = {name: value for name, value in options.items() if value not in (None, False)}
    chosen = check_mode(mode) if mode is not None else _mode_of(policy)
    for name in asked:
        if name not in HONOURED[chosen]:
            raise Unsupported(f"mode {chosen!r} cannot honour {name}", hint=f"drop {name}, or choose another mode")
    if policy is not None:
        if base_url is not None:
            raise ConfigError("policy and base_url both say who answers", hint="give one of them")
        made = policies.parse(policy, model=model, key=key) if isinstance(policy, str) else policy
        _fits(chosen, made)
        return Answering(mode=chosen, policy=made, settings=asked, owned=isinstance(policy, str))
    if chosen == "interception_gate":
        raise ConfigError(
            "mode 'interception_gate' needs a policy that holds calls", hint="pass policy=ry.policy.Queue()"
        )
    if calls_nobody:
        return Answering(mode=chosen, policy=policies.scripted({"steps": []}), owned=True)
    if base_url is None:
        raise ConfigError(f"mode {chosen!r} needs base_url or policy", hint="name the model server that answers")
    if chosen == "black_box":
        return Answering(mode=chosen, policy=policies.passthrough(base_url, key=key), owned=True)
    return Answering(mode=chosen, policy=policies.upstream(base_url, model=model, key=key), settings=asked, owned=True)


def _mode_of(policy: Policy | str | None) -> Mode:
    if isinstance(policy, policies.Queue) or policy == "queue":
        return "interception_gate"
    return "black_box" if isinstance(policy, Passthrough) else "transparent_proxy"


def _fits(mode: Mode, policy: Policy) -> None:
    if mode == "interception_gate" and not isinstance(policy, policies.Queue):
        raise ConfigError(
            "mode 'interception_gate' needs a policy that holds calls", hint="pass policy=ry.policy.Queue()"
        )
    if mode == "black_box" and not isinstance(policy, Passthrough):
        raise ConfigError(
            "mode 'black_box' passes bytes through", hint="give base_url, or policy=ry.policy.passthrough(url)"
        )
