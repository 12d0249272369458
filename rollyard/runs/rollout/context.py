"""What the stages of one rollout share, and the values that each hands to the next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Literal, NamedTuple, TypeVar, cast

import anyio

from rollyard.core.agent import Launch
from rollyard.core.errors import EnvError, Error
from rollyard.core.limits import Limits
from rollyard.core.protocols import Backend, Sandbox
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import Step, Task
from rollyard.gate import Gate, Session
from rollyard.runs.rollout.collect import DirectoryCopy
from rollyard.runs.rollout.judge import Judge
from rollyard.runs.rollout.phases import PhaseHosts
from rollyard.runs.rollout.plan import Hook, PausePoint, RolloutPlan, SessionOptions
from rollyard.runs.rollout.prepare import SandboxFacts
from rollyard.runs.rollout.programs import Process
from rollyard.runs.rollout.provision import Provision, ProvisionedImage
from rollyard.runs.rollout.record import Record
from rollyard.runs.rollout.services import RunningService
from rollyard.runs.rollout.stages import StageFailed, Stages
from rollyard.tasks.planted_files import StateBefore

T = TypeVar("T")

AT_ONCE: AbstractAsyncContextManager[object] = nullcontext()


class RolloutContext(NamedTuple):
    task: Task
    plan: RolloutPlan
    session: SessionOptions
    backend: Backend
    gate: Gate
    provision: Provision
    judge: Judge
    limits: Limits
    stages: Stages
    record: Record
    ending: AbstractAsyncContextManager[object] = AT_ONCE  # held while an agent is stopped, collected and judged


class OpenedSandbox(NamedTuple):
    """After provision: a sandbox, and the way from it to the model. An agent that calls no model has no session, and neither
    has one that is given the model's own address."""

    sandbox: Sandbox
    spec: SandboxSpec
    image: ProvisionedImage
    session: Session | None
    root_url: str
    variables: Mapping[str, str]  # of the caller's hooks
    hosts: PhaseHosts
    own_key: str = ""  # of an agent that is given the model's own address
    services: tuple[RunningService, ...] = ()

    @property
    def key(self) -> str:
        """The agent's key now: a session gives each step a fresh one."""
        return self.own_key if self.session is None else self.session.key or ""


class Prepared(NamedTuple):
    """After prepare: the agent can start. `before` is the working directory as the agent finds it."""

    opened: OpenedSandbox
    facts: SandboxFacts
    prefix: str
    before: DirectoryCopy
    startup: StateBefore | None
    ready_at: float
    running: Mapping[Process, str] = {}  # before the task's setup, where that is asked for


class AgentTurn(NamedTuple):
    """What the agent is asked to do once: the task, or one step of it."""

    instruction: str
    step: Step | None = None
    last: bool = True
    again: bool = False  # what the user says next: the agent goes on from its session

    @property
    def own_limit_s(self) -> float | None:
        """What the step says about its time; None leaves it to `limits.agent`."""
        return self.step.agent_timeout_s if self.step is not None else None


class Acted(NamedTuple):
    """After wait: the agent was started and has ended, one way or the other, or is `alive` and has to be."""

    prepared: Prepared
    turn: AgentTurn
    launch: Launch
    alive: bool = False


class WaitFailed(StageFailed):
    """The agent ended badly; what it did may still be judged."""

    def __init__(self, failed: StageFailed, acted: Acted) -> None:
        super().__init__(failed.stage, failed.boundary, failed.error)
        self.acted = acted


Moment = Literal["after_setup", "after_agent", "before_verdict"]


async def run_hooks(context: RolloutContext, when: Moment, sandbox: Sandbox) -> None:
    hooks: tuple[Hook, ...] = getattr(context.plan.hooks, when)
    for hook in hooks:
        await call_hook(hook, when, sandbox, context.record.rollout)


async def hold(context: RolloutContext, point: PausePoint, sandbox: Sandbox) -> None:
    """Waits for a caller who takes the rollout stage by stage."""
    pauses = context.plan.pauses
    if pauses is None:
        return
    async with context.stages.pause():
        try:
            with anyio.fail_after(pauses.hold_s):
                await pauses.at(point, sandbox, context.record.rollout)
        except TimeoutError as error:
            late = EnvError(
                f"its caller held the rollout for more than {pauses.hold_s:g} s ({point})", hint="raise hold_s"
            )
            raise StageFailed(context.stages.current, "env", late) from error


async def call_hook(hook: Callable[..., Awaitable[T] | T], when: str, *given: object) -> T:
    """A function of the caller's, async or not."""
    try:
        found = hook(*given)
        return cast("T", await found if isinstance(found, Awaitable) else found)
    except Exception as error:  # user code: any error becomes one that names the hook
        name = getattr(hook, "__name__", type(hook).__name__)
        raise Error(f"hook {name!r} ({when}) failed: {str(error) or type(error).__name__}") from error
