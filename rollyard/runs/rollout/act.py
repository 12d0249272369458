"""launch and wait: the agent is started with its files, its environment and the model's address, and watched until it ends."""

from __future__ import annotations

from rollyard import agents
from rollyard.core.agent import Launch
from rollyard.core.branch_point import RESUME_MARK
from rollyard.core.errors import AgentTimeout, Error, RolloutStale
from rollyard.core.protocols import Job
from rollyard.core.task import McpServer
from rollyard.gate import Session
from rollyard.runs.rollout import model_outage, prepare
from rollyard.runs.rollout.agent_monitor import AgentMonitor, EndedHow, Ending
from rollyard.runs.rollout.context import Acted, AgentTurn, OpenedSandbox, Prepared, RolloutContext, WaitFailed, hold
from rollyard.runs.rollout.phases import enter_phase
from rollyard.runs.rollout.route_check import check_route, find_direct_outage
from rollyard.runs.rollout.stages import StageFailed
from rollyard.tasks.host_variables import resolve_env, resolve_servers
from rollyard.tasks.trust import readable_variables

_NOTHING = ("/bin/sh", "-c", ":")  # what an agent without a program runs, so that nop takes the same path as any other


async def act(context: RolloutContext, prepared: Prepared, turn: AgentTurn) -> Acted:
    """An agent that did not end well raises `WaitFailed`, which holds what this would have returned."""
    async with context.stages.stage("launch"):
        enter_phase(prepared.opened.sandbox, prepared.opened.hosts, "agent")
        asks_again = await check_route(context, prepared.opened)
        launch = await _describe_launch(context, prepared, turn)
        job = await _start(context, prepared, turn, launch)
    await hold(context, "started", prepared.opened.sandbox)
    acted = Acted(prepared, turn, launch)
    try:
        await _wait(context, job, acted)
    finally:
        if asks_again and (outage := await find_direct_outage(context)) is not None:
            raise StageFailed("wait", "policy", outage)
    return acted


async def _describe_launch(context: RolloutContext, prepared: Prepared, turn: AgentTurn) -> Launch:
    plan, opened, facts = context.plan, prepared.opened, prepared.facts
    options = plan.options
    return Launch(
        instruction=RESUME_MARK if plan.resumed else turn.instruction,
        resumes="call" if plan.resumed else "turn" if turn.again else None,
        model=plan.model,
        root_url=opened.root_url,
        key=opened.key,
        home=prepare.HOME,
        workdir=facts.workdir,
        prefix=prepared.prefix,
        isolation=opened.sandbox.info.isolation,
        as_root=facts.as_root,
        system_prompt=options.system_prompt,
        disabled_tools=options.disabled_tools,
        disable_thinking=plan.switches.disable_thinking,
        max_tokens=plan.switches.max_tokens,
        dialect=options.dialect,
        mcp=(*_task_servers(context), *options.mcp, *_gate_servers(context, opened)),
        solution=await context.provision.solution(opened.sandbox, context.task, turn.step, plan.agent),
        allow_unsafe=options.allow_unsafe,
    )


async def _start(context: RolloutContext, prepared: Prepared, turn: AgentTurn, launch: Launch) -> Job:
    task, facts, sandbox = context.task, prepared.facts, prepared.opened.sandbox
    user = (turn.step.agent_user if turn.step else None) or task.user
    rendered = agents.render(context.plan.agent, launch)
    for path, data in rendered.files.items():
        await sandbox.write(path, data, mode=0o600, user=user)
    # The agent's own interpreters stay off the task's PATH
    env = {
        "PATH": facts.path,
        **resolve_env(task.env, readable_variables(task), where=f"task {task.id}"),
        **prepared.opened.variables,
        **_solution_env(context),
        **rendered.env,
    }
    return await sandbox.start(rendered.argv or _NOTHING, env=env, cwd=facts.workdir, user=user)


async def _wait(context: RolloutContext, job: Job, acted: Acted) -> None:
    agent, record, limits = context.plan.agent, context.record, context.limits
    session, own_s = acted.prepared.opened.session, acted.turn.own_limit_s
    limit_s = own_s if own_s is not None else limits.agent
    limit_name = "the step's agent_timeout_s" if own_s is not None else None
    alive = True
    max_staleness = context.plan.options.max_staleness if context.plan.options.when_stale == "cancel" else None

    def is_stale() -> bool:
        return max_staleness is not None and session is not None and session.staleness > max_staleness

    def find_end() -> EndedHow | None:
        if session is not None and session.prefix is not None and session.prefix.diverged is not None:
            return "diverged"
        return "stale" if is_stale() else None

    monitor = AgentMonitor(job, agents.parse(agent), session, limits.idle, context.stages, record.log, find_end)
    try:
        async with context.stages.stage("wait", limit_s=limit_s, limit_name=limit_name):
            try:
                ending = await monitor.wait()
            except BaseException:  # its time is up, or it is cancelled: what was seen of it is kept
                seen = tuple(monitor.events)
                record.note_ending(Ending(how="exited", exit_code=None, events=seen))
                raise
            alive = False
            record.note_ending(ending)
            if session is not None and is_stale():
                raise RolloutStale(
                    f"answers of policy version {session.oldest_version} are too old: the newest is {session.newest_version}, "
                    f"and max_staleness is {max_staleness}",
                    hint='raise max_staleness, or let such rollouts end with when_stale="mask"',
                )
            if (off := _find_divergence(context, session)) is not None:
                raise off
            spent = model_outage.judge_ending(
                ending, session, agent=agent.name, model=context.plan.model, idle_s=limits.idle
            )
            if spent is not None:
                record.note(status="budget", stop_reason=spent)
    except StageFailed as failed:
        if isinstance(failed.error, AgentTimeout):
            outage = model_outage.find_outage(session, context.plan.model, excused_wait_s=limit_s / 2)
            if outage is not None:
                raise StageFailed("wait", "policy", outage) from failed
            if (off := _find_divergence(context, session)) is not None:
                raise StageFailed("wait", "gate", off) from failed
            if (stopped := model_outage.find_stop_reason(session)) is not None:
                record.note(stop_reason=stopped)
        raise WaitFailed(failed, acted._replace(alive=alive)) from failed
    finally:
        record.note_log()
        if session is not None:
            for what, times in session.refused_tools.items():
                await context.stages.tell("model.server_tool_refused", what=what, times=times)
            session.refused_tools.clear()
            record.note_session(session)


def _find_divergence(context: RolloutContext, session: Session | None) -> Error | None:
    """Why a rollout is no branch of its parent: it asked something else, or ended before it was there."""
    prefix = session.prefix if session is not None else None
    if prefix is None:
        return None
    if prefix.diverged is not None:
        return prefix.diverged
    return None if prefix.reached or model_outage.find_outage(session, context.plan.model) else prefix.unreached_error()


def _task_servers(context: RolloutContext) -> tuple[McpServer, ...]:
    """The task's servers, for an agent that has a model to use them."""
    if not context.plan.agent.calls_model:
        return ()
    return resolve_servers(context.task.mcp, readable_variables(context.task), where=f"task {context.task.id}")


def _gate_servers(context: RolloutContext, opened: OpenedSandbox) -> tuple[McpServer, ...]:
    """The gate's tool endpoint, for a rollout that was given tools on the trainer's side."""
    if opened.session is None or context.session.tools is None or not context.session.tools.tools:
        return ()
    headers = {"Authorization": f"Bearer {opened.key}"}
    return (McpServer(name="rollyard", url=f"{opened.root_url}/mcp", headers=headers),)


def _solution_env(context: RolloutContext) -> dict[str, str]:
    """What the task's solution needs, for the oracle alone."""
    if context.plan.agent.name != "oracle":
        return {}
    task = context.task
    return resolve_env(task.solution_env, readable_variables(task), where=f"task {task.id}: solution.env")
