"""The one lifecycle. Every way to run an agent (command line, Python, environments, control plane, executors) ends here.

    provision -> prepare -> launch -> wait -> stop -> verify -> collect

Each stage has a deadline out of one `Limits`, a record and events. The agent is dead and its key revoked before it is judged.
Whatever happens, cancellation included, the sandbox is closed and the session is shut; a failure is a value on the `Rollout`,
charged to the boundary it crossed, and only cancellation is raised.
"""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack
from typing import Any

import anyio
import msgspec

from rollyard import agents
from rollyard.core.agent import Launch
from rollyard.core.errors import AgentTimeout, Error, SandboxUnavailable
from rollyard.core.protocols import Backend, EventSink, Sandbox
from rollyard.core.rollout import CommandRecord, Failure, Rollout, Status, Verdict
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import McpServer, Step, Task
from rollyard.gate import Gate, Session
from rollyard.runs.rollout import collect, model_outage, prepare
from rollyard.runs.rollout.agent_monitor import AgentMonitor, Ending
from rollyard.runs.rollout.failures import classify
from rollyard.runs.rollout.judge import Judge
from rollyard.runs.rollout.plan import RolloutPlan, SessionOptions, check
from rollyard.runs.rollout.provision import Provision, ProvisionedImage
from rollyard.runs.rollout.sandbox_spec import rollout_spec
from rollyard.runs.rollout.stages import StageFailed, Stages, nowhere
from rollyard.tasks import steps
from rollyard.tasks.host_variables import resolve_env, resolve_servers
from rollyard.tasks.python_startup import StartUp

_CLEANUP_S = 30.0
_TAIL = 8192
_NOTHING = ("/bin/sh", "-c", ":")  # what an agent without a program runs, so that nop takes the same path as any other


async def rollout(
    task: Task,
    plan: RolloutPlan,
    *,
    session: SessionOptions,
    backend: Backend,
    gate: Gate,
    provision: Provision,
    sink: EventSink = nowhere,
) -> Rollout:
    """Run one attempt at one task. Bad options raise `ConfigError` before anything opens; all else is in the result."""
    check(plan, task, backend)
    return await _Rollout(task, plan, backend, gate, session, provision, sink).run()


class _Rollout:
    """The mutable middle of a rollout; `run` turns it into the frozen value."""

    def __init__(
        self,
        task: Task,
        plan: RolloutPlan,
        backend: Backend,
        gate: Gate,
        session_options: SessionOptions,
        provision: Provision,
        sink: EventSink,
    ) -> None:
        self.task, self.plan, self.backend, self.gate = task, plan, backend, gate
        self.session_options, self.provision = session_options, provision
        self.limits = plan.limits_for(task)
        self.stages = Stages(plan.rollout_id, self.limits, sink, plan.run_id)
        self.started_at, self.clock = time.time(), time.monotonic()
        self.status: Status = "completed"
        self.failure: Failure | None = None
        self.stop_reason: str | None = None
        self.setup: tuple[CommandRecord, ...] = ()
        self.verdict: Verdict | None = None
        self.ending: Ending | None = None
        self.launched: Launch | None = None
        self.ground: ProvisionedImage | None = None
        self.spec = SandboxSpec()
        self.step: Step | None = None  # the one under way, in a task of several
        self.judge = Judge(backend, provision, plan.verifier, gate.policy)
        self.collected: tuple[CommandRecord, ...] = ()
        self.prefix = ""
        self.root_url = ""
        self.sandbox: Sandbox | None = None
        self.session: Session | None = None
        self.place: prepare.SandboxFacts | None = None
        self.before = collect.DirectoryCopy()
        self.startup: StartUp | None = None
        self.workdir: bytes | None = None
        self.files: dict[str, bytes] = {}
        self.diff: str | None = None
        self.log = b""

    async def run(self) -> Rollout:
        stack = AsyncExitStack()
        try:
            async with stack:
                try:
                    await self._provision(stack)
                    await self._prepare()
                    await self._attempt()
                except StageFailed as failed:
                    self._fail(failed)
                    await self._judge_what_is_left()
                finally:
                    await self._teardown()
        except StageFailed as failed:
            self._fail(failed)
        return self.result()

    # provision

    async def _provision(self, stack: AsyncExitStack) -> None:
        specs = self.judge.specs(self.task)
        sites = (self.task, *(spec.site for spec in specs if spec.site is not None))
        building = sum(site.build_timeout_s for site in sites if site.build is not None)
        async with self.stages.stage(
            "provision", limit_s=self.limits.boot + self.limits.install + building
        ) as deadline:
            ground = await self.provision.ground(self.task, self.plan.agent, self.backend, deadline)
            await self.provision.verifier_tools(specs, self.backend, deadline)
            self.spec = spec = rollout_spec(self.plan, self.task, ground.built, ground.layers, self.backend)
            sandbox = await self._open(spec, min(deadline.left, self.limits.boot))
            self.sandbox, self.ground = sandbox, ground
            stack.push_async_callback(self._close_sandbox)
            await self.stages.tell(
                "sandbox.opened",
                sandbox_id=sandbox.id,
                backend=self.backend.name,
                isolation=sandbox.info.isolation,
                image=spec.image,
            )
            if self.plan.direct is not None:
                self.root_url = self.plan.direct[0].removesuffix("/").removesuffix("/v1")
            elif self.plan.agent.dialect is not None:
                asked = self.session_options
                self.session = await self.gate.open_session(
                    self.plan.rollout_id,
                    policy=asked.policy,
                    budget=asked.budget,
                    settings=asked.settings,
                    tools=asked.tools,
                    lease=asked.lease,
                )
                self.root_url = await self._route(self.session)

    async def _open(self, spec: SandboxSpec, limit_s: float) -> Sandbox:
        try:
            with anyio.fail_after(limit_s):
                return await self.backend.open(spec)
        except TimeoutError as error:
            raise SandboxUnavailable(
                f"the sandbox did not open within limits.boot ({self.limits.boot:g} s)", hint="raise limits.boot"
            ) from error

    async def _route(self, session: Session) -> str:
        """The gate's address as the agent sees it, proved to answer before the agent starts."""
        assert self.sandbox is not None
        if self.plan.options.gate_url is not None:
            return self.plan.options.gate_url.rstrip("/")
        listener = await self.sandbox.listen(0)
        await self.gate.serve(listener, session)
        self.gate.check(session)
        await self.provision.prove_route(self.sandbox, listener.port)
        return f"http://127.0.0.1:{listener.port}"

    # prepare

    async def _prepare(self) -> None:
        assert self.sandbox is not None
        assert self.ground is not None
        task = self.task
        async with self.stages.stage("prepare") as deadline:
            self.place = await prepare.look_around(self.sandbox, self.spec, deadline)
            await self.sandbox.mkdir(prepare.HOME, user=task.user)
            await prepare.put_files(self.sandbox, task.files, self.place.workdir, task.user)
            if task.skills is not None:
                await prepare.put_skills(self.sandbox, task.skills, task.user, deadline)
            self.prefix = await self.provision.ready(self.sandbox, self.plan.agent, self.ground, deadline)
            self.setup, failed = await prepare.run_setup(
                self.sandbox, task.setup, cwd=self.place.workdir, user=None, stages=self.stages, deadline=deadline
            )
            if failed is not None:
                raise prepare.setup_failed(failed)
            if task.healthcheck is not None:
                await prepare.wait_healthy(self.sandbox, task.healthcheck, cwd=self.place.workdir, deadline=deadline)
            for hook in self.plan.hooks.after_setup:
                await self._hook(hook, "after_setup")
            self.before = await collect.copy_out(self.sandbox, self.place.workdir)
            self.startup = await self.judge.look(task, self.sandbox, self.place.workdir)

    # the attempt: once, or once per step

    async def _attempt(self) -> None:
        if not self.task.steps:
            await self._act(self.task.instruction, self.limits.agent, None)
            await self._stop(None)
            await self._collect()
            await self._verify(None)
            return
        verdicts: list[Verdict] = []
        for number, step in enumerate(self.task.steps):
            self.step = step
            await self._begin_step(step, number)
            await self._act(step.instruction, step.agent_timeout_s or self.limits.agent, step)
            last = number == len(self.task.steps) - 1
            await self._stop(step, final=last)
            if last:
                await self._collect()
            await self._verify(step)
            verdicts.append(self.verdict or Verdict(status="none"))
            if not steps.may_go_on(step, verdicts[-1]):
                self.stop_reason = f"step {step.name!r} missed its minimum reward"
                break
        self.verdict = steps.combine(self.task, verdicts)

    async def _begin_step(self, step: Step, number: int) -> None:
        assert self.sandbox is not None
        assert self.place is not None
        async with self.stages.stage("prepare") as deadline:
            await self.stages.tell("step.started", step=step.name, number=number)
            if step.workdir_files is not None:
                await self.sandbox.upload_dir(step.workdir_files, self.place.workdir, user=self.task.user)
                if await self.sandbox.exists(f"{self.place.workdir}/setup.sh"):
                    done, failed = await prepare.run_setup(
                        self.sandbox,
                        ("bash setup.sh",),
                        cwd=self.place.workdir,
                        user=None,
                        stages=self.stages,
                        deadline=deadline,
                    )
                    self.setup += done
                    if failed is not None:
                        raise prepare.setup_failed(failed)
            if step.healthcheck is not None:
                await prepare.wait_healthy(self.sandbox, step.healthcheck, cwd=self.place.workdir, deadline=deadline)
            if number and self.session is not None:
                await self.session.unlock()

    async def _act(self, instruction: str, limit_s: float, step: Step | None) -> None:
        """launch and wait"""
        assert self.sandbox is not None
        assert self.place is not None
        plan, agent, place = self.plan, self.plan.agent, self.place
        user = (step.agent_user if step else None) or self.task.user
        async with self.stages.stage("launch"):
            launch = Launch(
                instruction=instruction,
                model=plan.model,
                root_url=self.root_url,
                key=self._key(),
                home=prepare.HOME,
                workdir=place.workdir,
                prefix=self.prefix,
                isolation=self.sandbox.info.isolation,
                as_root=place.as_root,
                system_prompt=plan.options.system_prompt,
                disabled_tools=plan.options.disabled_tools,
                disable_thinking=plan.switches.disable_thinking,
                max_tokens=plan.switches.max_tokens,
                dialect=plan.options.dialect,
                mcp=(*self._task_mcp(), *plan.options.mcp, *self._own_tools()),
                solution=await self.provision.solution(self.sandbox, self.task, step, agent),
                allow_unsafe=plan.options.allow_unsafe,
            )
            self.launched = launch
            rendered = agents.render(agent, launch)
            for path, data in rendered.files.items():
                await self.sandbox.write(path, data, mode=0o600, user=user)
            env = {
                "PATH": place.path,
                **resolve_env(self.task.env, os.environ, where=f"task {self.task.id}"),
                **self._solution_env(),
                **rendered.env,
            }  # the agent's own interpreters stay off the task's PATH
            argv = rendered.argv or _NOTHING
            job = await self.sandbox.start(argv, env=env, cwd=place.workdir, user=user)
        watch = AgentMonitor(job, agents.parse(agent), self.session, self.limits.idle, self.stages)
        try:
            async with self.stages.stage("wait", limit_s=limit_s):
                self.ending = await watch.wait()
                spent = model_outage.weigh(self.ending, self.session, agent=agent.name, idle_s=self.limits.idle)
                if spent is not None:
                    self.status, self.stop_reason = "budget", spent
        except StageFailed as failed:
            self.ending = self.ending or Ending(how="exited", exit_code=None, events=tuple(watch.events), log=watch.log)
            if isinstance(failed.error, AgentTimeout):
                if (away := model_outage.model_was_away(self.session, limit_s)) is not None:
                    raise StageFailed("wait", "policy", away) from failed
                if model_outage.context_was_full(self.session):
                    self.stop_reason = model_outage.CONTEXT
            raise
        finally:
            self.log += watch.log

    def _task_mcp(self) -> tuple[McpServer, ...]:
        """The task's servers, for an agent that has a model to use them."""
        if not self.plan.agent.calls_model:
            return ()
        return resolve_servers(self.task.mcp, os.environ, where=f"task {self.task.id}")

    def _solution_env(self) -> dict[str, str]:
        """What the task's solution needs, for the oracle alone."""
        if self.plan.agent.name != "oracle":
            return {}
        return resolve_env(self.task.solution_env, os.environ, where=f"task {self.task.id}: solution.env")

    def _own_tools(self) -> tuple[McpServer, ...]:
        """The gate's tool endpoint, for a rollout that was given tools on the trainer's side."""
        if self.session is None or self.session.tools is None:
            return ()
        headers = {"Authorization": f"Bearer {self._key()}"}
        return (McpServer(name="rollyard", url=f"{self.root_url}/mcp", headers=headers),)

    def _key(self) -> str:
        if self.plan.direct is not None:
            return self.plan.direct[1]
        return (self.session.key or "") if self.session is not None else ""

    # stop, collect, verify

    async def _stop(self, step: Step | None, *, final: bool = True) -> None:
        """Every process of the agent is dead and its key is worth nothing before anybody judges."""
        assert self.sandbox is not None
        assert self.place is not None
        async with self.stages.stage("stop"):
            if self.session is not None:
                await (self.session.close() if final else self.session.lock())
            spec = self.judge.spec(self.task, step)
            self.collected = await self.judge.collect(spec, self.sandbox, self.place.workdir) if spec else ()
            if spec is None or spec.grade != "live":
                await self.sandbox.kill_processes()

    async def _collect(self) -> None:
        assert self.sandbox is not None
        assert self.place is not None
        async with self.stages.stage("collect"):
            after = await collect.copy_out(self.sandbox, self.place.workdir)
            self.diff = collect.patch(self.before, after)
            self.workdir = after.tar
            patterns = agents.artifacts(self.plan.agent, self.launched) if self.launched else ()
            asked = (*self.plan.options.collect, *(artifact.source for artifact in self.task.artifacts))
            wanted = [p if p.startswith("/") else f"{self.place.workdir}/{p}" for p in asked]
            self.files = await collect.artifacts(self.sandbox, [*patterns, *wanted])

    async def _verify(self, step: Step | None) -> None:
        assert self.sandbox is not None
        assert self.place is not None
        spec = self.judge.spec(self.task, step)
        if spec is None:
            return
        limit = spec.timeout_s if spec.timeout_s is not None else self.limits.verify
        async with self.stages.stage("verify", limit_s=limit) as deadline:
            verdict = await self.judge(
                spec,
                self.result(),
                self.sandbox,
                place=self.spec,
                workdir=self.place.workdir,
                collected=self.collected,
                step=step,
                deadline=deadline,
                before=self.startup,
            )
            self.verdict = verdict
            await self.stages.tell("verdict", reward=verdict.reward, status=verdict.status, grade=verdict.grade)

    async def _judge_what_is_left(self) -> None:
        """An agent that timed out or gave up is judged all the same, out of the time reserved for it."""
        if self.failure is None or not self.failure.grade or self.failure.stage != "wait":
            return
        step = self.step
        try:
            await self._stop(step)
            await self._collect()
            await self._verify(step)
        except StageFailed as failed:
            self._fail(failed)

    # endings

    def _fail(self, failed: StageFailed) -> None:
        if self.failure is None or not self.failure.grade or failed.stage == "verify":
            self.status, self.failure = classify(failed.error, stage=failed.stage, boundary=failed.boundary)

    async def _hook(self, hook: Any, when: str) -> None:
        assert self.sandbox is not None
        name = getattr(hook, "__name__", type(hook).__name__)
        try:
            await hook(self.sandbox, self.result())
        except Exception as error:  # user code: any error becomes one that names the hook
            raise Error(f"hook {name!r} ({when}) failed: {error}") from error

    async def _teardown(self) -> None:
        with anyio.move_on_after(_CLEANUP_S, shield=True):
            try:
                if self.sandbox is not None:
                    for hook in self.plan.hooks.teardown:
                        await self._hook(hook, "teardown")
            except Error as error:
                if self.failure is None:
                    self._fail(StageFailed("collect", "sandbox", error))
            if self.session is not None:
                await self.session.close()

    async def _close_sandbox(self) -> None:
        assert self.sandbox is not None
        with anyio.move_on_after(_CLEANUP_S, shield=True):
            try:
                await self.sandbox.kill()
            except Error as error:  # what was judged stands; the sandbox's own TTL and the reaper end it by its labels
                await self.stages.tell("sandbox.not_closed", sandbox_id=self.sandbox.id, error=str(error))
                return
            await self.stages.tell("sandbox.closed", sandbox_id=self.sandbox.id)

    def result(self) -> Rollout:
        session, sandbox = self.session, self.sandbox
        return Rollout(
            id=self.plan.rollout_id,
            task=self.task,
            attempt=self.plan.attempt,
            run_id=self.plan.run_id,
            group_id=self.plan.group_id,
            episode_id=self.plan.episode_id,
            agent=self.plan.agent.name,
            agent_version=self.plan.agent.version,
            mode=self.plan.mode,
            sandbox_id=sandbox.id if sandbox else None,
            sandbox=self.backend.name,
            isolation=sandbox.info.isolation if sandbox else None,
            image=sandbox.info.image if sandbox else None,
            seed=self.plan.options.seed,
            labels=self.plan.options.labels,
            status=self.status,
            stop_reason=self.stop_reason,
            verdict=self.verdict,
            failure=self.failure,
            setup=self.setup,
            stages=tuple(self.stages.records),
            events=self.ending.events if self.ending else (),
            exit_code=self.ending.exit_code if self.ending else None,
            log_tail=self.log[-_TAIL:].decode("utf-8", "backslashreplace"),
            gate_log_tail=session.log_tail() if session is not None and self.failure is not None else None,
            files=self.files,
            workdir=self.workdir,
            diff=self.diff,
            calls=session.calls if session else 0,
            usage=msgspec.to_builtins(session.usage) if session else {},
            started_at=self.started_at,
            wall_s=time.monotonic() - self.clock,
            trajectory=session.trajectory if session else None,
        )
