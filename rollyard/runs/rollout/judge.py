"""From a task's verifier to a verdict: chooses the verifier, gathers its tools, and hands over to the grades of `tasks`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import msgspec

from rollyard.core.limits import Deadline
from rollyard.core.protocols import Backend, Policy, Sandbox, Verifier
from rollyard.core.rollout import CommandRecord, Rollout, Verdict
from rollyard.core.sandbox import Network, SandboxSpec
from rollyard.core.task import Site, Step, Task, VerifierSpec
from rollyard.images.layers import layer_prefix
from rollyard.runs.rollout.prepare import put_files
from rollyard.runs.rollout.provision import Provision
from rollyard.tasks import grade
from rollyard.tasks.host_variables import resolve_env
from rollyard.tasks.planted_files import StateBefore, look
from rollyard.tasks.trust import readable_variables
from rollyard.tasks.verifiers import verifier_for
from rollyard.tasks.verifiers.sandboxed_python import sandboxed_python
from rollyard.tasks.verifiers.weighted import as_judge


class Evidence(NamedTuple):
    """What is judged: the rollout so far and its sandbox, which `place` describes. `collected` is what the task's own hooks
    said when the agent ended; `before` is what was seen before it started."""

    rollout: Rollout
    sandbox: Sandbox
    place: SandboxSpec
    workdir: str
    collected: tuple[CommandRecord, ...] = ()
    step: Step | None = None
    before: StateBefore | None = None
    record: Callable[[CommandRecord], None] | None = None  # told each command of the verifier's when it has ended
    keep: Callable[[Sandbox], Awaitable[None]] | None = None  # shown the verifier's sandbox when it has judged


class Judge:
    """`verifier` is a callable that takes the place of the task's own; `policy` answers a model judge."""

    def __init__(
        self, backend: Backend, provision: Provision, verifier: Verifier | None = None, policy: Policy | None = None
    ) -> None:
        self._backend, self._provision, self._policy = backend, provision, policy
        self._verifier = as_judge(verifier)  # a plain function too

    def spec(self, task: Task, step: Step | None) -> VerifierSpec | None:
        """How this task (or step) is judged; None when no verifier does."""
        own = step.verifier if step is not None else task.verifier
        if self._verifier is None:
            return own
        chosen = getattr(self._verifier, "grade", None)
        if own is not None:
            return msgspec.structs.replace(own, grade=chosen) if chosen is not None else own
        return VerifierSpec(kind="python", grade=chosen or "sealed")

    def specs(self, task: Task) -> tuple[VerifierSpec, ...]:
        """How the task is judged, or each of its steps."""
        found = (self.spec(task, step) for step in task.steps or (None,))
        return tuple(spec for spec in found if spec is not None)

    async def look(self, task: Task, sandbox: Sandbox, workdir: str) -> StateBefore | None:
        """How things are before the agent starts. What Python loads unasked matters to a verdict in the agent's own file
        system only."""
        specs = self.specs(task)
        if not specs:
            return None
        start_up = any(spec.grade != "sealed" for spec in specs)
        return await look(sandbox, workdir, self._provision.known_files, start_up=start_up)

    async def collect(self, spec: VerifierSpec, sandbox: Sandbox, workdir: str) -> tuple[CommandRecord, ...]:
        """The task's hooks that save run-time state, while the processes they look at still live."""
        return await grade.collect(spec, sandbox, workdir)

    async def __call__(self, spec: VerifierSpec, evidence: Evidence, deadline: Deadline) -> Verdict:
        task, place, workdir, step = evidence.rollout.task, evidence.place, evidence.workdir, evidence.step

        async def prepare(fresh: Sandbox) -> None:
            """The task's files and setup, in a sandbox from its image."""
            await put_files(fresh, task.files, workdir, task.user)
            for command in task.setup:
                await fresh.exec(command, cwd=workdir, timeout=max(1.0, deadline.left))

        layers = await self._provision.layers(spec.layers, task, self._backend)
        case = grade.Judging(
            spec=spec,
            rollout=evidence.rollout,
            place=place,
            workdir=workdir,
            artifacts=(*task.artifacts, *(step.artifacts if step is not None else ())),
            site=await self._site(task, spec.site, place, deadline) if spec.site is not None else None,
            agent_user=task.user,
            layers=layers,
            tools=tuple(f"{layer_prefix(layer)}/bin" for layer in layers),
            env=resolve_env(spec.env, readable_variables(task), where=f"task {task.id}: verifier.env"),
            timeout_s=max(1.0, deadline.left),
            collected=evidence.collected,
            before=evidence.before,
            known=self._provision.known_files,
            record=evidence.record,
            keep=evidence.keep,
        )
        sandboxed = None if task.trusted else partial(self._sandbox_python, case)
        verifier = self._verifier or verifier_for(spec, self._policy, sandboxed=sandboxed)
        forget = self._provision.forget
        return await grade.judge(case, evidence.sandbox, self._backend, verifier, forget=forget, prepare=prepare)

    def _sandbox_python(self, case: grade.Judging, spec: VerifierSpec) -> Verifier:
        """Code of an author who is not trusted, in a sandbox beside the judge's."""
        return sandboxed_python(spec, self._backend, grade.describe_fresh(case), case.tools)

    async def _site(self, task: Task, site: Site, place: SandboxSpec, deadline: Deadline) -> SandboxSpec:
        """A place of the verifier's own, with its image built."""
        built = await self._provision.image(site, self._backend, deadline)
        return msgspec.structs.replace(
            place,
            image=built.image,
            layers=await self._provision.layers(site.layers, task, self._backend),
            env={
                **built.env,
                **resolve_env(site.env, readable_variables(task), where="verifier.environment.env"),
            },
            workdir=site.workdir or built.workdir,
            user=built.user,
            resources=site.resources,
            network=msgspec.convert(site.network or "none", Network),
            allowed_hosts=site.allowed_hosts,
        )
