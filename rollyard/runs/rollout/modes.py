"""A mode is a choice of policy, not a second code path.

`black_box`: calls pass through to `base_url` untouched; that a call happened is recorded, its content is not.
`transparent_proxy`: the gate relays to an upstream and records everything.
`interception_gate`: the gate holds each call until the trainer answers it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard import policy as policies
from rollyard.core.agent import Agent
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.protocols import DeclaresOptions, Passthrough, Policy
from rollyard.core.rollout import Mode
from rollyard.runs.rollout.open_policy import silent_policy
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.runs.rollout.plan import AgentSwitches, check_mode

# what each mode can do to a model call, where the policy does not say itself; anything else asked for is refused by name
HONOURED: dict[Mode, frozenset[str]] = {
    "black_box": frozenset(),
    "transparent_proxy": frozenset({"disable_thinking", "max_tokens_cap", "top_logprobs", "seed"}),
    "interception_gate": frozenset({"max_tokens_cap", "seed"}),
}


# options that reach into a model call, and what the agent calls those it may honour where the mode leaves its calls alone
_OF_CALLS = ("disable_thinking", "max_tokens_cap", "top_logprobs", "seed")
_AGENTS_OWN = {"disable_thinking": "disable_thinking", "max_tokens_cap": "max_tokens"}


class PolicyChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers the calls of a rollout, in which mode, with which session settings."""

    mode: Mode
    policy: Policy
    settings: Mapping[str, Any] = {}
    switches: AgentSwitches = AgentSwitches()
    owned: bool = False  # made here, so closed here


def choose(
    options: RolloutOptions, *, policy: Policy | None = None, key: str | None = None, agent: Agent | None = None
) -> PolicyChoice:
    """`policy` or the server at `base_url`; without a mode the policy says which it is. An agent that calls no model
    (`oracle`, `nop`) needs neither. An option that the mode cannot honour is left to the agent when it has that switch."""
    mode = check_mode(options.mode) if options.mode is not None else _mode_of(policy)
    if policy is not None:
        if options.base_url is not None:
            raise ConfigError("policy and base_url both say who answers", hint="give one of them")
        _fits(mode, policy)
        if agent is not None:
            _refuse_toolless(policy, agent)
    if options.max_staleness is not None and mode == "black_box":
        raise Unsupported("mode 'black_box' reads no policy versions: max_staleness cannot hold", hint="choose another")
    answers = policy if policy is not None else _open(mode, options, key, agent)
    settings, switches = _divide(options, mode, answers, agent)
    return PolicyChoice(mode=mode, policy=answers, settings=settings, switches=switches, owned=policy is None)


def _divide(
    options: RolloutOptions, mode: Mode, policy: Policy, agent: Agent | None
) -> tuple[dict[str, Any], AgentSwitches]:
    """The options of calls: what the policy acts on, and what is left to the agent."""
    asked: dict[str, Any] = {name: getattr(options, name) for name in _OF_CALLS}
    asked = {name: value for name, value in asked.items() if value is not None}
    if agent is not None and not agent.calls_model:
        asked.pop("seed", None)  # an attempt's number alone, for one that asks nothing
    honoured = policy.honours if isinstance(policy, DeclaresOptions) else HONOURED[mode]
    left: dict[str, Any] = {}
    for name in [name for name in asked if name not in honoured]:
        value = asked.pop(name)
        if name == "disable_thinking" and value is False:
            continue  # nothing takes the thinking away
        if agent is None or _AGENTS_OWN.get(name) not in agent.switches:
            who = f"the policy of mode {mode!r} ({type(policy).__name__})"
            raise Unsupported(f"{who} cannot honour {name}", hint=f"drop {name}, or choose another mode or policy")
        left[_AGENTS_OWN[name]] = value
    if "seed" in asked:
        asked["sampling"] = {"seed": asked.pop("seed")}
    return asked, AgentSwitches(**left)


def _open(mode: Mode, options: RolloutOptions, key: str | None, agent: Agent | None) -> Policy:
    """The policy of a rollout that was given none."""
    if mode == "interception_gate":
        raise ConfigError(
            "mode 'interception_gate' needs a policy that holds calls", hint="pass policy=ry.policy.Queue()"
        )
    if agent is not None and not agent.calls_model:
        return silent_policy()
    if options.base_url is None:
        raise ConfigError(f"mode {mode!r} needs base_url or policy", hint="name the model server that answers")
    key = key if key is not None else read_key(options.key_env)
    if mode == "black_box":
        return policies.passthrough(options.base_url, key=key)
    return policies.upstream(options.base_url, model=options.model, key=key)


def read_key(variable: str | None) -> str | None:
    """The key that the variable of this name holds."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"the variable {variable!r} named by key_env is not set")
    return os.environ[variable]


def find_direct(options: RolloutOptions, key: str | None = None) -> tuple[str, str] | None:
    """The address and the key that a direct agent is given."""
    if not options.direct:
        return None
    key = key if key is not None else read_key(options.key_env)
    if options.mode != "black_box" or options.base_url is None or key is None:
        raise ConfigError("direct=True is for mode='black_box' with base_url and key given explicitly")
    return options.base_url, key


def _mode_of(policy: Policy | None) -> Mode:
    if isinstance(policy, policies.Queue):
        return "interception_gate"
    return "black_box" if isinstance(policy, Passthrough) else "transparent_proxy"


def _refuse_toolless(policy: Policy, agent: Agent) -> None:
    """An agent that works by tools, under a chat template with no place for them: said once, before anything opens."""
    if agent.calls_model and agent.acts_by == "tools" and getattr(policy, "takes_tools", None) is False:
        raise Unsupported(
            f"the chat template of the policy's model has no place for tools, and agent {agent.name!r} works by them",
            hint='choose another agent or model, or leave the tools out: tools="omit" (#tools=omit behind the policy)',
        )


def _fits(mode: Mode, policy: Policy) -> None:
    if mode == "interception_gate" and not isinstance(policy, policies.Queue):
        raise ConfigError(
            "mode 'interception_gate' needs a policy that holds calls", hint="pass policy=ry.policy.Queue()"
        )
    if mode == "black_box" and not isinstance(policy, Passthrough):
        raise ConfigError(
            "mode 'black_box' passes bytes through", hint="give base_url, or policy=ry.policy.passthrough(url)"
        )
