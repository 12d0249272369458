"""stop, collect and verify: the agent is dead and its key revoked, what it left is taken out, and then it is judged."""

from __future__ import annotations

import math
import time
from contextlib import AsyncExitStack, suppress
from functools import partial

import anyio
import msgspec

from rollyard import agents
from rollyard.core.errors import SandboxError
from rollyard.core.limits import TTL_MARGIN_S
from rollyard.core.protocols import Sandbox
from rollyard.core.rollout import CommandRecord, Verdict
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import VerifierSpec
from rollyard.runs.rollout import collect
from rollyard.runs.rollout.context import Acted, OpenedSandbox, RolloutContext, hold, run_hooks
from rollyard.runs.rollout.judge import Evidence
from rollyard.runs.rollout.phases import enter_phase
from rollyard.runs.rollout.services import stop_services
from rollyard.runs.rollout.stages import StageFailed
from rollyard.tasks.verifiers.sandbox import LOGS
from rollyard.trajectory.samples import merge_counts

_EXTEND_S = 5.0  # at least, from one extension of a sandbox's time to the next


async def conclude(context: RolloutContext, acted: Acted) -> Verdict | None:
    """One turn of the agent, from its end to its verdict. Only the last turn's files are collected. An agent that ended by
    itself waits until the machine is ready for it, with a dead key; one that may still live is stopped before it waits."""
    async with AsyncExitStack() as place:
        if not acted.alive:
            await _take_place(context, acted, place)
        hooks = await _stop(context, acted)
        if acted.alive:
            await _take_place(context, acted, place)
        if acted.turn.last:
            await _collect(context, acted)
            await hold(context, "ended", acted.prepared.opened.sandbox)
        return await _verify(context, acted, hooks)


async def _take_place(context: RolloutContext, acted: Acted, place: AsyncExitStack) -> None:
    opened, session = acted.prepared.opened, acted.prepared.opened.session
    async with context.stages.pause():
        if session is not None and not acted.alive:  # what it left running asks the model for nothing meanwhile
            await session.lock()
        async with anyio.create_task_group() as group:
            for sandbox in (opened.sandbox, *(service.sandbox for service in opened.services)):
                group.start_soon(_keep_open, context, sandbox, opened.spec.ttl_s)
            await place.enter_async_context(context.ending)
            group.cancel_scope.cancel()


async def _keep_open(context: RolloutContext, sandbox: Sandbox, ttl_s: float) -> None:
    """What waits for its place is not closed meanwhile: before less is left than judging may take, its time begins anew."""
    needed_s = 2 * context.limits.setup + context.limits.verify + TTL_MARGIN_S
    while sandbox.capabilities.extend and sandbox.info.expires_at is not None:
        await anyio.sleep(max(_EXTEND_S, sandbox.info.expires_at - time.time() - needed_s))
        with suppress(SandboxError):  # it is asked again
            await sandbox.extend(min(max(ttl_s, 2 * needed_s), sandbox.capabilities.max_ttl_s or math.inf))


async def _stop(context: RolloutContext, acted: Acted) -> tuple[CommandRecord, ...]:
    """Every process of the agent is dead and its key is worth nothing before the verifier judges. Gives what the task's own hooks
    said, which run while the processes they look at still live."""
    opened, workdir = acted.prepared.opened, acted.prepared.facts.workdir
    async with context.stages.stage("stop"):
        if opened.session is not None:
            await (opened.session.close() if acted.turn.last else opened.session.lock())
            context.record.note_session(opened.session)
            context.record.note(merged=merge_counts(opened.session.trajectory))
            limit, newest = context.plan.options.max_staleness, opened.session.newest_version
            if limit is not None and newest is not None:
                context.record.note(stale_before=newest - limit)
        await run_hooks(context, "after_agent", opened.sandbox)
        spec = context.judge.spec(context.task, acted.turn.step)
        collected = await context.judge.collect(spec, opened.sandbox, workdir) if spec else ()
        if spec is None or spec.grade != "live":
            await opened.sandbox.kill_processes()
        await stop_services(opened.services)
        enter_phase(opened.sandbox, opened.hosts, "verify")
    return collected


async def _collect(context: RolloutContext, acted: Acted) -> None:
    sandbox, workdir = acted.prepared.opened.sandbox, acted.prepared.facts.workdir
    async with context.stages.stage("collect"):
        after = await collect.copy_out(sandbox, workdir)
        context.record.note(diff=collect.patch(acted.prepared.before, after), workdir=after.tar)
        if acted.turn.step is None:  # the verifier of an earlier step has written there too
            context.record.note(writes=await collect.list_writes(sandbox, workdir, acted.prepared.ready_at))
        patterns = agents.artifacts(context.plan.agent, acted.launch)
        mine, _ = _split_collect(context)
        asked = (*mine, *(artifact.source for artifact in context.task.artifacts))
        wanted = [path if path.startswith("/") else f"{workdir}/{path}" for path in asked]
        context.record.note(files=await collect.artifacts(sandbox, [*patterns, *wanted]))


async def _verify(context: RolloutContext, acted: Acted, collected: tuple[CommandRecord, ...]) -> Verdict | None:
    spec = context.judge.spec(context.task, acted.turn.step)
    if spec is None:
        return None
    ran: list[CommandRecord] = []
    try:
        return await _judge(context, acted, spec, collected, ran)
    except StageFailed as failed:  # there is no reward; what ran until then is kept
        commands = (*collected, *ran)
        context.record.note(
            verdict=Verdict(status="failed", grade=spec.grade, error=str(failed.error), commands=commands)
        )
        raise


async def _judge(
    context: RolloutContext,
    acted: Acted,
    spec: VerifierSpec,
    collected: tuple[CommandRecord, ...],
    ran: list[CommandRecord],
) -> Verdict:
    """`ran` is given each command of the verifier's when it has ended."""
    opened, prepared = acted.prepared.opened, acted.prepared
    limit_name = "the verifier's timeout_s" if spec.timeout_s is not None else None
    async with context.stages.stage("verify", limit_s=spec.timeout_s, limit_name=limit_name) as deadline:
        await run_hooks(context, "before_verdict", opened.sandbox)
        evidence = Evidence(
            rollout=context.record.rollout,
            sandbox=opened.sandbox,
            place=_describe_place(opened),
            workdir=prepared.facts.workdir,
            collected=collected,
            step=acted.turn.step,
            before=prepared.startup,
            record=ran.append,
            keep=partial(_keep_logs, context),
        )
        verdict = await context.judge(spec, evidence, deadline)
        context.record.note(verdict=verdict)
        await context.stages.tell("verdict", reward=verdict.reward, status=verdict.status, grade=verdict.grade)
    return verdict


async def _keep_logs(context: RolloutContext, sandbox: Sandbox) -> None:
    """What the verifier itself wrote, where `collect` asks for it: it may be in a sandbox that the agent has never seen."""
    _, patterns = _split_collect(context)
    if patterns:
        with suppress(SandboxError):  # a verdict stands without its logs
            kept = await collect.artifacts(sandbox, patterns)
            context.record.note(files={**context.record.rollout.files, **kept})


def _split_collect(context: RolloutContext) -> tuple[list[str], list[str]]:
    """What is asked of the agent's sandbox, and of the verifier's: what an agent put at that place is no log of a verifier."""
    asked = context.plan.options.collect
    logs = [path for path in asked if path.startswith(f"{LOGS}/")]
    return [path for path in asked if path not in logs], logs


def _describe_place(opened: OpenedSandbox) -> SandboxSpec:
    """What judging opens sandboxes from: what is shown to the agent is no evidence, and services that live on are in reach."""
    kept = any(one.service.verify == "keep" for one in opened.services)
    return msgspec.structs.replace(opened.spec, mounts=(), beside=opened.sandbox.id if kept else None)
