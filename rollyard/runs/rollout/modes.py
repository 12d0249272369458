"""A mode is a choice of policy, not a second code path.

`black_box`: calls pass through to `base_url` untouched; that a call happened is recorded, its content is not.
`transparent_proxy`: the gate relays to an upstream and records everything.
`interception_gate`: the gate holds each call until the trainer answers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollyard import policy as policies
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.protocols import Passthrough, Policy
from rollyard.core.rollout import Mode
from rollyard.runs.rollout.plan import check_mode
from rollyard.runs.run.policies import silent_policy

# what each mode can do to a model call; anything else asked for is refused by name
HONOURED: dict[Mode, frozenset[str]] = {
    "black_box": frozenset(),
    "transparent_proxy": frozenset({"disable_thinking", "max_tokens_cap", "top_logprobs", "sampling"}),
    "interception_gate": frozenset({"max_tokens_cap"}),
}


# options that an agent may honour where the mode leaves its calls alone, as the agent names them
_AGENTS_OWN = {"disable_thinking": "disable_thinking", "max_tokens_cap": "max_tokens"}


class Answering(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers the calls of a rollout, in which mode, with which session settings."""

    mode: Mode
    policy: Policy
    settings: Mapping[str, Any] = {}
    left_to_agent: Mapping[str, Any] = {}
    owned: bool = False  # made here, so closed here


def choose(
    mode: str | None,
    *,
    policy: Policy | None = None,
    base_url: str | None = None,
    model: str | None = None,
    key: str | None = None,
    calls_nobody: bool = False,
    switches: Sequence[str] = (),
    **options: Any,
) -> Answering:
    """`policy` wins over `base_url`; without a mode the policy says which it is. An agent that `calls_nobody` (`oracle`,
    `nop`) needs neither. An option that the mode cannot honour is left to the agent when that is among its `switches`."""
    asked = {name: value for name, value in options.items() if value not in (None, False)}
    chosen = check_mode(mode) if mode is not None else _mode_of(policy)
    left: dict[str, Any] = {}
    for name in [name for name in asked if name not in HONOURED[chosen]]:
        if _AGENTS_OWN.get(name) not in switches:
            raise Unsupported(f"mode {chosen!r} cannot honour {name}", hint=f"drop {name}, or choose another mode")
        left[_AGENTS_OWN[name]] = asked.pop(name)
    answering = _choose(chosen, policy, base_url, model, key, calls_nobody, asked)
    return msgspec.structs.replace(answering, left_to_agent=left)


def _choose(
    chosen: Mode,
    policy: Policy | None,
    base_url: str | None,
    model: str | None,
    key: str | None,
    calls_nobody: bool,
    asked: Mapping[str, Any],
) -> Answering:
    if policy is not None:
        if base_url is not None:
            raise ConfigError("policy and base_url both say who answers", hint="give one of them")
        _fits(chosen, policy)
        return Answering(mode=chosen, policy=policy, settings=asked)
    if chosen == "interception_gate":
        raise ConfigError(
            "mode 'interception_gate' needs a policy that holds calls", hint="pass policy=ry.policy.Queue()"
        )
    if calls_nobody:
        return Answering(mode=chosen, policy=silent_policy(), owned=True)
    if base_url is None:
        raise ConfigError(f"mode {chosen!r} needs base_url or policy", hint="name the model server that answers")
    if chosen == "black_box":
        return Answering(mode=chosen, policy=policies.passthrough(base_url, key=key), owned=True)
    return Answering(mode=chosen, policy=policies.upstream(base_url, model=model, key=key), settings=asked, owned=True)


def _mode_of(policy: Policy | None) -> Mode:
    if isinstance(policy, policies.Queue):
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
