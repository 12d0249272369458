"""What one rollout is asked to do, beside its task: a frozen `RolloutPlan`, and the checks made before anything opens.

Every option takes effect or is refused by name; unset means the documented default.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from rollyard import agents
from rollyard.core.agent import Agent
from rollyard.core.call import Dialect
from rollyard.core.errors import ConfigError, Error, Unsupported
from rollyard.core.limits import Limits
from rollyard.core.protocols import Backend, Sandbox, Verifier
from rollyard.core.rollout import MODES, Mode, Rollout
from rollyard.core.sandbox import Isolation, Lifetime
from rollyard.core.task import McpServer, Task
from rollyard.runs.rollout.failures import classify
from rollyard.tasks import requirements

AGENTS_MODEL = "policy"  # what agents call the model where nobody named one
Hook = Callable[[Sandbox, Rollout], Awaitable[None]]


class Hooks(msgspec.Struct, frozen=True):
    """`after_setup` run before the agent; `teardown` always run, last. A failing one is an error with its name."""

    after_setup: tuple[Hook, ...] = ()
    teardown: tuple[Hook, ...] = ()


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    rollout_id: str
    agent: Agent
    mode: Mode = "transparent_proxy"
    model: str = AGENTS_MODEL
    attempt: int = 0
    run_id: str | None = None
    attempt_id: str | None = None  # the claim it is done under
    group_id: str | None = None
    episode_id: str | None = None
    seed: int | None = None
    labels: Mapping[str, str] = {}
    limits: Limits | None = None  # None: the task's, else the defaults
    system_prompt: str | None = None
    disabled_tools: tuple[str, ...] = ()
    mcp: tuple[McpServer, ...] = ()
    disable_thinking: bool = False  # by the agent itself; mostly the gate does it
    max_tokens: int | None = None  # likewise
    dialect: Dialect | None = None  # None: the agent's own first one
    allow_network: bool = False
    allow_unsafe: bool = False
    min_isolation: Isolation = "landlock"
    lifetime: Lifetime = "owner"
    verifier: Verifier | None = None  # a callable that takes the place of the task's own
    files_wanted: tuple[str, ...] = ()  # globs to bring back in `Rollout.files`
    hooks: Hooks = Hooks()
    direct: tuple[str, str] | None = None  # base url and key the agent is given itself (`black_box` only)
    gate_url: str | None = None  # a route of the user's own to the gate, instead of a listener in the sandbox
    sandbox_options: Mapping[str, str] = {}

    def limits_for(self, task: Task) -> Limits:
        return self.limits or task.limits or Limits()


def check_mode(mode: str) -> Mode:
    for known in MODES:
        if mode == known:
            return known
    raise ConfigError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")


def check(plan: RolloutPlan, task: Task, backend: Backend) -> None:
    """Everything that can be refused before a sandbox opens, refused by name."""
    can = backend.capabilities
    requirements.refuse(task, backend.name, can, allow_network=plan.allow_network)
    if not can.listen and plan.gate_url is None and plan.agent.dialect is not None:
        raise Unsupported(
            f"backend {backend.name!r} cannot carry model calls out of the sandbox",
            hint="pass gate_url= with a route of your own",
        )
    if plan.direct is not None and not can.network_allowlist and not plan.allow_unsafe:
        raise Unsupported(
            f"backend {backend.name!r} cannot open one host only, so direct=True would open the whole network",
            hint="pass allow_unsafe=True if you mean it, or drop direct",
        )
    offered = plan.mcp
    if plan.agent.dialect is not None:  # an agent without a model (oracle, nop) needs no tools and no past
        requirements.refuse_history(task, plan.agent.name)
        offered = (*task.mcp, *plan.mcp)
    agents.refuse(
        plan.agent,
        {
            "system_prompt": plan.system_prompt,
            "disabled_tools": plan.disabled_tools,
            "mcp": offered,
            "disable_thinking": plan.disable_thinking,
            "max_tokens": plan.max_tokens,
            "dialect": plan.dialect,
        },
    )


def refusal(task: Task, plan: RolloutPlan, backend: str, error: Error) -> Rollout:
    """An attempt that nothing is opened for: this agent, task and backend do not fit, or it was given up. It has no score."""
    status, failure = classify(error, stage="provision", boundary="agent")
    return Rollout(
        id=plan.rollout_id,
        task=task,
        attempt=plan.attempt,
        run_id=plan.run_id,
        group_id=plan.group_id,
        agent=plan.agent.name,
        agent_version=plan.agent.version,
        mode=plan.mode,
        sandbox=backend,
        seed=plan.seed,
        labels=plan.labels,
        status=status,
        failure=failure,
        started_at=time.time(),
    )
