"""What one rollout is asked to do, beside its task: a frozen `RolloutPlan`, and the checks made before anything opens.

Every option takes effect or is refused by name; unset means the documented default.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, BinaryIO, Literal

import msgspec

from rollyard import agents
from rollyard.core.agent import Agent
from rollyard.core.branch_point import BranchPoint
from rollyard.core.egress import parse_build_network, parse_network_option
from rollyard.core.errors import ConfigError, Error, Unsupported
from rollyard.core.lease import Lease
from rollyard.core.limits import Limits
from rollyard.core.protocols import Backend, Policy, Prefix, Sandbox, SleepsSandboxes, Verifier
from rollyard.core.rollout import MODES, CallSnapshot, Mode, Rollout
from rollyard.core.sandbox import Capabilities
from rollyard.core.sequences import check_sequences
from rollyard.core.task import McpServer, Task
from rollyard.envs.browser.client import BrowserLeases
from rollyard.envs.fleet.provider import EnvProvider
from rollyard.envs.fleet.sdk import FleetProvider
from rollyard.envs.fleet.task_instance import Leases
from rollyard.gate import Budget
from rollyard.runs.rollout.failures import classify
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.runs.rollout.provision import keeps_images
from rollyard.tasks import requirements, trust
from rollyard.tasks.network import give_network
from rollyard.tools import Toolset

AGENTS_MODEL = "policy"  # what agents call the model where no option names one
Hook = Callable[[Sandbox, Rollout], Awaitable[None] | None]


ImageHook = Callable[[Task], Awaitable[str | None] | str | None]
VariablesHook = Callable[[Task], Awaitable[Mapping[str, str]] | Mapping[str, str]]


class Hooks(msgspec.Struct, frozen=True):
    """A caller's own functions in the lifecycle, async or not; a failing one is an error with its name.

    `image` chooses the image that the sandbox opens from (the first that names one does), `variables` are added to those of the
    task, for the agent and its setup, and are in no record. `after_setup` run before the agent, `after_agent` when it has ended
    and its key is worth nothing but its processes still live, `before_verdict` when they are dead and what it left is collected.
    `teardown` all run, last, whatever happened and whatever one of them does."""

    after_setup: tuple[Hook, ...] = ()
    teardown: tuple[Hook, ...] = ()
    image: tuple[ImageHook, ...] = ()
    variables: tuple[VariablesHook, ...] = ()
    after_agent: tuple[Hook, ...] = ()
    before_verdict: tuple[Hook, ...] = ()

    def __post_init__(self) -> None:
        check_sequences(self)


PausePoint = Literal["prepared", "started", "ended", "over"]


class StagePauses(msgspec.Struct, frozen=True, kw_only=True):
    """A caller that takes a rollout stage by stage. `at(point, sandbox, rollout)` is awaited when the agent may start, when it
    was started, when it is dead and about to be judged, and before the sandbox is closed; the rollout goes on when it returns.
    What is spent there counts against no limit of the rollout: each may take `hold_s`, and the sandbox lives as much longer.
    `log` is given all that the agent prints, without the bound that `Rollout.log` has."""

    at: Callable[[PausePoint, Sandbox, Rollout], Awaitable[None]]
    hold_s: float = 3600.0
    log: BinaryIO | None = None

    @property
    def ttl_s(self) -> float:
        """What the sandbox's life is longer by: three of the four may wait."""
        return 3 * self.hold_s


class AgentSwitches(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent does itself because the mode leaves its calls alone; mostly the gate does it."""

    disable_thinking: bool = False
    max_tokens: int | None = None


class SessionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout's session at the gate is opened with. Without a policy the gate's own answers."""

    policy: Policy | None = None
    budget: Budget = Budget()
    settings: Mapping[str, Any] = {}  # reach the policy as `Call.options`
    tools: Toolset | None = None
    lease: Lease | None = None
    user: Policy | None = None  # answers the agent's last message, in the user's place
    prefix: Prefix | None = None  # what a rollout that branches off another one begins with


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout: its options, who it is, and what the caller's own code adds."""

    rollout_id: str
    agent: Agent
    options: RolloutOptions = RolloutOptions()
    mode: Mode = "transparent_proxy"
    switches: AgentSwitches = AgentSwitches()
    attempt: int = 0
    run_id: str | None = None
    attempt_id: str | None = None  # the claim it is done under
    group_id: str | None = None
    episode_id: str | None = None
    verifier: Verifier | None = None  # a callable that takes the place of the task's own
    hooks: Hooks = Hooks()
    pauses: StagePauses | None = None
    provider: EnvProvider | None = None  # of remote environments, in place of the one that variables name
    leases: Leases | None = None  # who lends browsers, likewise
    branch: BranchPoint | None = None  # where it branches off another rollout
    resumed: bool = False  # the agent goes on from the parent's session, in the files of `start`
    start: CallSnapshot | None = None  # the parent's files at the branch point
    direct: tuple[str, str] | None = None  # base url and key the agent is given itself (`black_box` only)

    @property
    def model(self) -> str:
        """As the agent names it."""
        return self.options.model or AGENTS_MODEL

    @property
    def parent_rollout(self) -> str | None:
        return None if self.branch is None else self.branch.rollout

    @property
    def parent_call(self) -> str | None:
        return None if self.branch is None else self.branch.call

    def limits_for(self, task: Task) -> Limits:
        return self.options.limits or task.limits or Limits()


def check_mode(mode: str) -> Mode:
    for known in MODES:
        if mode == known:
            return known
    raise ConfigError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")


def with_options(plan: RolloutPlan, task: Task, can: Capabilities) -> Task:
    """The task with the image and the network that the options name, trusted as far as they say."""
    if plan.options.image is not None:
        task = msgspec.structs.replace(task, image=plan.options.image, build=None)
    task = trust.apply_trust(task, trust_tasks=plan.options.trust_tasks, env=plan.options.env)
    option = parse_network_option(plan.options.network)
    building = option if plan.options.build_network is None else parse_build_network(plan.options.build_network)
    return give_network(task, option, can, building=building, pull=plan.options.pull)


def check(plan: RolloutPlan, task: Task, backend: Backend) -> None:
    """Everything that can be refused before a sandbox opens, refused by name."""
    can, options = backend.capabilities, plan.options
    if options.image not in (None, "host") and not can.images:
        raise Unsupported(f"backend {backend.name!r} has no images, so not image={options.image!r}", hint="drop image")
    task = with_options(plan, task, can)
    if plan.verifier is None:
        trust.refuse_host_code(task)
    requirements.refuse(task, backend.name, can)
    _check_remote(plan, task)
    if not can.listen and options.gate_url is None and plan.agent.dialect is not None:
        raise Unsupported(
            f"backend {backend.name!r} cannot carry model calls out of the sandbox",
            hint="pass gate_url= with a route of your own",
        )
    if plan.direct is not None and not can.network_allowlist and not options.allow_unsafe:
        raise Unsupported(
            f"backend {backend.name!r} cannot open one host only, so direct=True would open the whole network",
            hint="pass allow_unsafe=True if you mean it, or drop direct",
        )
    if options.prebaked and not plan.agent.check:
        raise Unsupported(f"agent {plan.agent.name!r} has no check, so it cannot be looked for", hint="drop prebaked")
    if plan.branch is not None and (plan.mode == "black_box" or not plan.agent.calls_model):
        why = (
            "mode 'black_box' reads no calls" if plan.agent.calls_model else f"agent {plan.agent.name!r} calls no model"
        )
        raise Unsupported(f"{why}: it cannot branch at one", hint="choose another mode or rollout")
    if plan.branch is not None and task.steps:
        raise Unsupported(f"task {task.id!r} has steps, and a task with steps cannot be branched", hint="run it anew")
    if options.user is not None:
        _check_user(plan, task)
    if options.snapshot_every is not None:
        _check_snapshots(plan, task, backend)
    if options.sleep_after is not None:
        _check_sleep(plan, backend)
    if options.pull and not keeps_images(backend):
        raise Unsupported(
            f"backend {backend.name!r} does not open images of the local store, so none is pulled for it (pull)",
            hint="--sandbox-options pull=missing lets an engine pull" if backend.name == "docker" else "drop pull",
        )
    if options.mounts and not can.mounts:
        raise Unsupported(f"backend {backend.name!r} shows no directories of this machine", hint="drop mounts")
    offered = options.mcp
    if plan.agent.dialect is not None:  # an agent without a model (oracle, nop) needs no tools and no past
        requirements.refuse_history(task, plan.agent.name)
        gates = (McpServer(name="rollyard"),) if task.remote is not None else ()
        offered = (*task.mcp, *options.mcp, *gates)
    agents.refuse(
        plan.agent,
        {
            "system_prompt": options.system_prompt,
            "disabled_tools": options.disabled_tools,
            "mcp": offered,
            "disable_thinking": plan.switches.disable_thinking,
            "max_tokens": plan.switches.max_tokens,
            "dialect": options.dialect,
        },
    )


def _check_user(plan: RolloutPlan, task: Task) -> None:
    if plan.agent.resume is None:
        raise Unsupported(
            f"agent {plan.agent.name!r} cannot go on from a session of its own, so no user can answer it",
            hint="drop user, or choose another agent",
        )
    if plan.mode == "black_box":
        raise Unsupported("mode 'black_box' reads no answers, so no user can reply to them", hint="drop user")
    if task.steps or plan.branch is not None:
        what = f"task {task.id!r} has steps" if task.steps else "a rollout that branches goes on without its user"
        raise Unsupported(what, hint="drop user")


def _check_snapshots(plan: RolloutPlan, task: Task, backend: Backend) -> None:
    what = "snapshot_every keeps the files of a sandbox"
    if not backend.capabilities.snapshot:
        raise Unsupported(f"{what}, and backend {backend.name!r} takes no snapshots", hint="drop snapshot_every")
    if plan.mode == "black_box" or not plan.agent.calls_model:
        raise Unsupported(f"{what} at model calls, and none is read here", hint="drop snapshot_every")
    if task.steps or task.remote is not None:
        kind = "steps" if task.steps else "a remote environment"
        raise Unsupported(f"{what}, and task {task.id!r} has {kind}: it cannot be branched", hint="drop snapshot_every")


def _check_sleep(plan: RolloutPlan, backend: Backend) -> None:
    what = "an agent that sleeps has its memory paged out"
    if not isinstance(backend, SleepsSandboxes):
        raise Unsupported(
            f"{what}, and backend {backend.name!r} cannot", hint="let agents stay awake, or choose the backend local"
        )
    if plan.mode == "black_box" or not plan.agent.calls_model:
        raise Unsupported(f"{what} while a model call is held, and none is read here", hint="let agents stay awake")
    if plan.options.max_staleness is not None:
        raise Unsupported(
            f"{what}, and is not cancelled there when its answers grow old",
            hint="let agents stay awake, or let old answers be (without --max-staleness)",
        )
    if plan.agent.freeze_s and not backend.capabilities.pause:
        raise Unsupported(f"{what}, and {plan.agent.name!r} has to be frozen for it", hint="see `rollyard doctor`")
    backend.check_sleep()


def _check_remote(plan: RolloutPlan, task: Task) -> None:
    """A missing key or browser server is an error now, and not in the first rollout."""
    if task.remote is None:
        return
    if plan.direct is not None:
        raise Unsupported(f"the tools of task {task.id!r} reach the agent through the gate", hint="drop direct")
    if task.steps:
        raise Unsupported(f"task {task.id!r} has steps, which a remote environment has not")
    if plan.provider is None:
        FleetProvider()
    if plan.leases is None and task.remote.task_modality == "browser_use":
        BrowserLeases()


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
        seed=plan.options.seed,
        labels=plan.options.labels,
        parent_rollout=plan.parent_rollout,
        parent_call=plan.parent_call,
        status=status,
        failure=failure,
        started_at=time.time(),
    )
