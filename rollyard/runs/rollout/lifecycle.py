"""The one lifecycle. Every way to run an agent (command line, Python, environments, control plane, executors) ends here.

    install -> provision -> prepare -> launch -> wait -> stop -> collect -> verify

Each stage takes what the one before it gave, has a deadline out of one `Limits`, a record and events. The agent is dead and its
key revoked before it is judged. Whatever happens, cancellation included, the sandbox is closed and the session is shut; a
failure is a value on the `Rollout`, charged to the boundary it crossed, and only cancellation is raised.
"""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial

import anyio
import msgspec

from rollyard.core.agent import LayerSpec
from rollyard.core.errors import AgentInstallFailed, Error
from rollyard.core.limits import Deadline
from rollyard.core.protocols import Backend, BakesLayers, EventSink, Sandbox
from rollyard.core.rollout import CommandRecord, Rollout, Verdict
from rollyard.core.task import Step, Task
from rollyard.gate import Gate, Session
from rollyard.net.egress.proxy import WATCHER
from rollyard.runs.rollout import collect, prepare
from rollyard.runs.rollout.act import act
from rollyard.runs.rollout.conclude import conclude
from rollyard.runs.rollout.context import (
    AT_ONCE,
    AgentTurn,
    OpenedSandbox,
    Prepared,
    RolloutContext,
    WaitFailed,
    call_hook,
    hold,
    run_hooks,
)
from rollyard.runs.rollout.install_progress import tell_install
from rollyard.runs.rollout.judge import Judge
from rollyard.runs.rollout.kept_snapshots import remove_snapshots
from rollyard.runs.rollout.open_sandbox import open_sandbox, prove_route
from rollyard.runs.rollout.phases import enter_phase, list_hosts, open_for, refusals_to
from rollyard.runs.rollout.plan import RolloutPlan, SessionOptions, check, with_options
from rollyard.runs.rollout.programs import list_programs
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.record import Record
from rollyard.runs.rollout.remote import open_remote
from rollyard.runs.rollout.sandbox_spec import rollout_spec
from rollyard.runs.rollout.services import (
    RunningService,
    ServiceStarter,
    count_limit,
    find_services,
    start_command,
    start_services,
    with_services,
)
from rollyard.runs.rollout.sleep import let_sleep
from rollyard.runs.rollout.snapshots import watch_calls
from rollyard.runs.rollout.spans import trace_rollout
from rollyard.runs.rollout.stages import StageFailed, Stages, drop_event
from rollyard.runs.rollout.user_turns import converse, open_user
from rollyard.tasks import steps
from rollyard.tasks.grade import is_directory
from rollyard.tasks.network import asks_public, is_public
from rollyard.tasks.planted_files import StateBefore

CLEANUP_S = 30.0


async def rollout(
    task: Task,
    plan: RolloutPlan,
    *,
    session: SessionOptions,
    backend: Backend,
    gate: Gate,
    provision: Provision,
    ending: AbstractAsyncContextManager[object] = AT_ONCE,
    sink: EventSink = drop_event,
) -> Rollout:
    """Run one attempt at one task. Bad options raise `ConfigError` before anything opens; all else is in the result. `ending` is
    entered, once that is possible, to stop what the agent left running, to collect what it left and to judge it."""
    check(plan, task, backend)
    closed = plan.options.network == "task" and asks_public(task)
    task = with_options(plan, task, backend.capabilities)
    limits = plan.limits_for(task)
    stages = Stages(plan.rollout_id, limits, sink, plan.run_id)
    record = Record(task, plan, backend.name, stages)
    judge = Judge(backend, provision, plan.verifier, gate.policy)
    async with AsyncExitStack() as stack:
        session = await open_user(session, plan.options, stack)
        context = RolloutContext(task, plan, session, backend, gate, provision, judge, limits, stages, record, ending)
        opened: OpenedSandbox | None = None
        stack.callback(WATCHER.reset, WATCHER.set(refusals_to(stages)))
        if closed:
            await stages.tell("network.closed", why="the task asks for the public network; network is 'task'")
        try:
            context = await open_remote(context, stack)
            opened = await _provision(context, await _install(context), stack)
            prepared = await _prepare(context, opened, await _install_inside(context, opened))
            await watch_calls(context, prepared)
            let_sleep(context, prepared)
            await hold(context, "prepared", opened.sandbox)
            await _attempt(context, prepared)
        except StageFailed as failed:
            record.fail(failed)
            await _judge_what_is_left(context, failed)
        except BaseException:  # cancelled: no caller gets the rollout, so the snapshots it kept are removed
            with anyio.move_on_after(CLEANUP_S, shield=True):
                await remove_snapshots((record.rollout,), backend)
            raise
        if opened is not None and plan.pauses is not None:
            await _hold_open(context, opened)
    trace_rollout(record.rollout)
    return record.rollout


async def _hold_open(context: RolloutContext, opened: OpenedSandbox) -> None:
    """The sandbox is held for the caller. The agent is dead and its key revoked by then, even where no verifier ran."""
    with anyio.move_on_after(CLEANUP_S), suppress(Error):
        if opened.session is not None:
            await opened.session.close()
            context.record.note_session(opened.session)
        await opened.sandbox.kill_processes()
    with suppress(StageFailed):  # held for too long: it is closed
        await hold(context, "over", opened.sandbox)


async def _judge_what_is_left(context: RolloutContext, failed: StageFailed) -> None:
    """An agent that timed out or gave up is judged all the same, out of the time reserved for it."""
    failure = context.record.rollout.failure
    if not isinstance(failed, WaitFailed) or failure is None or not failure.grade:
        return
    acted = failed.acted._replace(turn=failed.acted.turn._replace(last=True))
    try:
        await conclude(context, acted)
    except StageFailed as later:
        context.record.fail(later)


# install: layers before the sandbox opens, and an upload into one that mounts none


async def _install(context: RolloutContext) -> str | None:
    """The agent's layer, found or built, and those that the task and its verifier name. Where there are none, no stage."""
    agent, specs, provision = context.plan.agent, context.judge.specs(context.task), context.provision
    tools = [spec.layers or (spec.site is not None and spec.site.layers) for spec in specs]
    if agent.layer == LayerSpec() and not context.task.layers and not any(tools):
        return None
    prebaked = await _is_prebaked(context)
    async with context.stages.stage("install") as deadline:
        await provision.layers(context.task.layers, context.task, context.backend)
        await provision.verifier_layers(context.task, specs, context.backend)
        if prebaked:
            return None
        try:
            async with tell_install(agent, provision.images.layers, context.stages.tell):
                return await provision.agent_layer(agent, context.backend, deadline)
        except AgentInstallFailed as failed:
            _note_failed_install(context, failed)
            raise


async def _install_inside(context: RolloutContext, opened: OpenedSandbox) -> str:
    """Where the agent lies in the sandbox. A backend that mounts no layers gets it uploaded; then its own setup runs."""
    agent, sandbox, prefix = context.plan.agent, opened.sandbox, opened.image.prefix
    commands = context.plan.options.agent_setup
    uploads = opened.image.agent_layer is not None and opened.image.baked is None and not sandbox.capabilities.layers
    if (not uploads and not commands) or context.plan.resumed:
        return prefix
    async with context.stages.stage("install") as deadline:
        if uploads:
            try:
                prefix = await context.provision.upload_agent(sandbox, agent, opened.image, deadline)
            except AgentInstallFailed as failed:
                _note_failed_install(context, failed)
                raise
        await prepare.run_agent_setup(sandbox, commands, context.record, context.stages, deadline)
    return prefix


async def _is_prebaked(context: RolloutContext) -> bool:
    """Whether the image brings the agent. It is looked for where that was asked for, and where the backend mounts no layers:
    there an agent that is found saves an upload, and one that was baked already needs no look."""
    plan, agent, backend, asked = context.plan, context.plan.agent, context.backend, context.plan.options.prebaked
    looks = asked if asked is not None else bool(agent.check) and not backend.capabilities.layers
    if not looks or agent.layer == LayerSpec():
        return False
    task = await _choose_image(context)
    limit_s, bound = context.limits.boot, "limits.boot"
    if task.build is not None or context.provision.must_pull(task.image, task, backend):
        limit_s, bound = limit_s + task.build_timeout_s, f"{bound} + environment.build_timeout_sec"
    async with context.stages.stage("provision", limit_s=limit_s, limit_name=bound) as deadline:
        built = await context.provision.image(task, backend, deadline)
        if not asked and await context.provision.find_baked(task, agent, built.image, backend) is not None:
            return False
        place = rollout_spec(plan, task, built, ())
        place = msgspec.structs.replace(place, labels={**place.labels, "rollyard.role": "look"})
        return await context.provision.find_prebaked(agent, place, backend, deadline)


def _note_failed_install(context: RolloutContext, failed: AgentInstallFailed) -> None:
    what = f"install of agent {context.plan.agent.name!r}"
    context.record.note_install(
        CommandRecord(command=what, exit_code=failed.exit_code, stdout=failed.stdout, stderr=failed.stderr)
    )


# provision


async def _provision(context: RolloutContext, layer: str | None, stack: AsyncExitStack) -> OpenedSandbox:
    """What is opened here is closed with the stack: first the teardown hooks, then the session, then the sandbox."""
    task, plan, backend, limits = context.task, context.plan, context.backend, context.limits
    specs = context.judge.specs(task)
    sites = (task, *(spec.site for spec in specs if spec.site is not None))
    building = sum(
        site.build_timeout_s
        for site in sites
        if site.build is not None or context.provision.must_pull(site.image, site, backend)
    )
    baking = limits.install if layer is not None and isinstance(backend, BakesLayers) else 0.0
    bound = "limits.boot" + (" + limits.install" if baking else "")
    bound += " + environment.build_timeout_sec" if building else ""
    found = find_services(task)
    bound += " and limits.boot for each service" if found is not None else ""
    limit_s = (
        limits.boot
        + baking
        + building
        + count_limit(task, found, limits.boot, lambda image: context.provision.must_pull(image, task, backend))
    )
    async with context.stages.stage("provision", limit_s=limit_s, limit_name=bound) as deadline:
        image = await context.provision.prepare_image(
            await _choose_image(context), plan.agent, layer, backend, deadline
        )
        variables = await _find_variables(context)
        await context.provision.verifier_images(specs, backend, deadline)
        spec = rollout_spec(plan, task, image.built, image.layers)
        spec = with_services(msgspec.structs.replace(spec, env={**spec.env, **variables}), found)
        hosts = list_hosts(plan, task, spec)
        opening = open_for(spec, hosts, plan, backend)
        if image.baked is not None:
            opening = msgspec.structs.replace(opening, image=image.baked)
        if plan.resumed and plan.start is not None:
            opening = msgspec.structs.replace(opening, image=plan.start.image)
        sandbox = await open_sandbox(context, opening, min(deadline.left, limits.boot))
        enter_phase(sandbox, hosts, "setup")
        context.record.note_sandbox(sandbox)
        stack.push_async_callback(_close_sandbox, context, sandbox)
        sessions = await stack.enter_async_context(AsyncExitStack())
        stack.push_async_callback(_run_teardown, context, sandbox)
        await context.stages.tell(
            "sandbox.opened",
            sandbox_id=sandbox.id,
            backend=backend.name,
            isolation=sandbox.info.isolation,
            image=spec.image,
        )
        services: tuple[RunningService, ...] = ()
        if found is not None:
            starter = ServiceStarter(task, opening, sandbox, backend, context.provision, context.stages)
            services = await start_services(starter, found, deadline, stack)
            await start_command(starter, found.main, image.built)
        opened = partial(OpenedSandbox, sandbox, spec, image, variables=variables, hosts=hosts, services=services)
        if plan.direct is not None:
            url, key = plan.direct
            return opened(None, url.removesuffix("/").removesuffix("/v1"), own_key=key)
        if plan.agent.dialect is None:
            return opened(None, "")
        session = await _open_session(context, sessions)
        return opened(session, await prove_route(context, sandbox, session))


async def _choose_image(context: RolloutContext) -> Task:
    """The task with the image that the first hook to name one chose."""
    for hook in context.plan.hooks.image:
        if (image := await call_hook(hook, "image", context.task)) is not None:
            return msgspec.structs.replace(context.task, image=image, build=None)
    return context.task


async def _find_variables(context: RolloutContext) -> dict[str, str]:
    found: dict[str, str] = {}
    for hook in context.plan.hooks.variables:
        found |= await call_hook(hook, "variables", context.task)
    return found


async def _open_session(context: RolloutContext, sessions: AsyncExitStack) -> Session:
    asked = context.session
    session = await context.gate.open_session(
        context.plan.rollout_id,
        policy=asked.policy,
        budget=asked.budget,
        settings=asked.settings,
        tools=asked.tools,
        lease=asked.lease,
        server_tools=is_public(context.task),
        prefix=asked.prefix,
    )
    sessions.push_async_callback(_close_session, context, session)
    context.record.note_session(session)
    return session


async def _run_teardown(context: RolloutContext, sandbox: Sandbox) -> None:
    """All of them, each with a time of its own; what failed is told by name."""
    failed: list[str] = []
    for hook in context.plan.hooks.teardown:
        try:
            with anyio.CancelScope(shield=True), anyio.fail_after(CLEANUP_S):
                await call_hook(hook, "teardown", sandbox, context.record.rollout)
        except TimeoutError:
            failed.append(
                f"hook {getattr(hook, '__name__', type(hook).__name__)!r} (teardown) took over {CLEANUP_S:g} s"
            )
        except Error as error:
            failed.append(error.message)
    if not failed:
        return
    message = "; ".join(failed)
    await context.stages.tell("teardown.failed", error=message)
    context.record.fail_teardown(StageFailed("collect", "sandbox", Error(message)))


async def _close_session(context: RolloutContext, session: Session) -> None:
    with anyio.move_on_after(CLEANUP_S, shield=True):
        try:
            await session.close()
        except (
            Error,
            TimeoutError,
        ) as error:  # its key is dead already; the rollout's end and the worker do not hang on it
            await context.stages.tell("session.not_closed", error=str(error) or type(error).__name__)
    context.record.note_session(session)


async def _close_sandbox(context: RolloutContext, sandbox: Sandbox) -> None:
    with anyio.move_on_after(CLEANUP_S, shield=True):
        try:
            await sandbox.kill()
        except Error as error:  # what was judged stands; the sandbox's own TTL and the reaper end it by its labels
            await context.stages.tell("sandbox.not_closed", sandbox_id=sandbox.id, error=str(error))
            return
        await context.stages.tell("sandbox.closed", sandbox_id=sandbox.id)


# prepare


async def _prepare(context: RolloutContext, opened: OpenedSandbox, prefix: str) -> Prepared:
    """Where an agent goes on from a session, what it began with is made again beside it, to be compared with its end."""
    async with context.stages.stage("prepare") as deadline:
        facts = await prepare.look_around(opened.sandbox, opened.spec, deadline)
        running = await list_programs(opened.sandbox) if context.plan.options.snapshot_every is not None else {}
        async with AsyncExitStack() as stack:
            sandbox = opened.sandbox
            if context.plan.resumed:
                sandbox = await stack.enter_async_context(context.backend.open(opened.spec))
                await prepare.look_around(sandbox, opened.spec, deadline)
            before, startup = await _begin_task(context, sandbox, facts, deadline)
    return Prepared(opened, facts, prefix, before, startup, time.time(), running)


async def _begin_task(
    context: RolloutContext, sandbox: Sandbox, facts: prepare.SandboxFacts, deadline: Deadline
) -> tuple[collect.DirectoryCopy, StateBefore | None]:
    task = context.task
    await sandbox.mkdir(prepare.HOME, user=task.user)
    await prepare.put_files(sandbox, task.files, facts.workdir, task.user)
    if task.skills is not None:
        await prepare.put_skills(sandbox, task.skills, task.user, deadline)
    await prepare.run_setup(sandbox, task.setup, facts.workdir, context.record, context.stages, deadline)
    if task.healthcheck is not None:
        await prepare.wait_healthy(sandbox, task.healthcheck, cwd=facts.workdir, deadline=deadline)
    await run_hooks(context, "after_setup", sandbox)
    before = await collect.copy_out(sandbox, facts.workdir, pack=False)
    return before, await context.judge.look(task, sandbox, facts.workdir)


# the attempt: once, or once per step


async def _attempt(context: RolloutContext, prepared: Prepared) -> None:
    task, record = context.task, context.record
    if not task.steps:
        await conclude(context, await converse(context, await act(context, prepared, AgentTurn(task.instruction))))
        return
    verdicts: list[Verdict] = []
    for number, step in enumerate(task.steps):
        await _begin_step(context, prepared, step, number)
        turn = AgentTurn(step.instruction, step, last=number == len(task.steps) - 1)
        verdict = await conclude(context, await act(context, prepared, turn))
        verdicts.append(verdict or Verdict(status="none"))
        if not steps.may_go_on(step, verdicts[-1]):
            record.note(stop_reason=f"step {step.name!r} missed its minimum reward")
            break
    record.note(verdict=steps.combine(task, verdicts))


async def _begin_step(context: RolloutContext, prepared: Prepared, step: Step, number: int) -> None:
    sandbox, session, workdir = prepared.opened.sandbox, prepared.opened.session, prepared.facts.workdir
    async with context.stages.stage("prepare") as deadline:
        enter_phase(sandbox, prepared.opened.hosts, "setup")
        await context.stages.tell("step.started", step=step.name, number=number)
        if number and not await is_directory(sandbox, workdir):  # the step before left something else in its place
            if await sandbox.exists(workdir):
                await sandbox.remove(workdir)
            await sandbox.mkdir(workdir, user=context.task.user)
        if step.workdir_files is not None:
            await sandbox.upload_dir(step.workdir_files, workdir, user=context.task.user)
            if await sandbox.exists(f"{workdir}/setup.sh"):
                await prepare.run_setup(sandbox, ("bash setup.sh",), workdir, context.record, context.stages, deadline)
        if step.healthcheck is not None:
            await prepare.wait_healthy(sandbox, step.healthcheck, cwd=workdir, deadline=deadline)
        if number and session is not None:
            await session.unlock()
