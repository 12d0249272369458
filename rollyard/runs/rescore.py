"""Judging again: a kept rollout's working directory is put into a fresh sandbox and its verifier runs as it did the first time.

The earlier verdict stays listed; the new one counts from now on. The agent does not run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import anyio.to_thread
import msgspec

from rollyard import sandbox as sandboxes
from rollyard.core.errors import ConfigError
from rollyard.core.limits import Deadline, Limits
from rollyard.core.protocols import Backend, Policy, Verifier
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.scratch import async_scratch
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs.rollout.collect import unpack
from rollyard.runs.rollout.judge import Evidence, Judge
from rollyard.runs.rollout.prepare import look_around, put_files
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.sandbox_spec import task_spec
from rollyard.store import Store
from rollyard.tasks.verifiers.python import Checks
from rollyard.tasks.verifiers.weighted import as_judge


class Rescored(msgspec.Struct, frozen=True, kw_only=True):
    rollout_id: str
    task_id: str
    attempt: int
    before: float | None
    after: float | None
    error: str | None = None

    @property
    def changed(self) -> bool:
        return self.before != self.after


async def rescore(
    store: Store,
    target: str,
    *,
    sandbox: str | Backend = "local",
    verifier: Checks | None = None,
    policy: Policy | None = None,
    tasks: dict[str, Task] | None = None,
) -> AsyncIterator[Rescored]:
    """Judge a run or a rollout again. `tasks` replaces tasks by id, for a verifier that was corrected since."""
    own = as_judge(verifier)
    kind, found = await store.resolve(target)
    ids = [found] if kind == "rollout" else [r.id async for r in store.rollouts(found)]
    provision = Provision.of(sandbox)
    if isinstance(sandbox, str):
        async with sandboxes.backend(sandbox) as backend:
            for rollout_id in ids:
                yield await _rescore_one(store, rollout_id, backend, provision, own, policy, tasks or {})
    else:
        for rollout_id in ids:
            yield await _rescore_one(store, rollout_id, sandbox, provision, own, policy, tasks or {})


async def _rescore_one(
    store: Store,
    rollout_id: str,
    backend: Backend,
    provision: Provision,
    verifier: Verifier | None,
    policy: Policy | None,
    tasks: dict[str, Task],
) -> Rescored:
    kept = await store.get_rollout(rollout_id)
    kept = msgspec.structs.replace(kept, task=tasks.get(kept.task.id, kept.task))
    row = partial(Rescored, rollout_id=kept.id, task_id=kept.task.id, attempt=kept.attempt, before=kept.reward)
    if kept.workdir is None:
        return row(after=kept.reward, error="its working directory was not kept")
    if kept.task.steps:
        return row(after=kept.reward, error="a multi-step task is judged step by step and not again")
    if kept.task.compose is not None:
        return row(after=kept.reward, error="its services are gone, and it is judged with them")
    judge = Judge(backend, provision, verifier, policy)
    spec = judge.spec(kept.task, None)
    if spec is None:
        raise ConfigError(f"task {kept.task.id!r} has no verifier", hint="give one, or rescore other rollouts")
    verdict = await _judge(kept, kept.workdir, spec, backend, provision, judge)
    await store.add_verdict(kept.id, verdict)
    return row(after=verdict.reward, error=verdict.error)


async def _judge(
    kept: Rollout, tar: bytes, spec: VerifierSpec, backend: Backend, provision: Provision, judge: Judge
) -> Verdict:
    task = kept.task
    limits = task.limits or Limits()
    deadline = Deadline.after(limits.setup + limits.verify, "limits.setup + limits.verify")
    built = await provision.image(task, backend, deadline)
    labels = {"rollyard.rollout": kept.id, "rollyard.role": "rescore"}
    place = task_spec(task, built, await provision.layers(task.layers, task, backend), labels=labels, limits=limits)
    async with backend.open(place) as box:
        where = await look_around(box, place, deadline)
        await put_files(box, task.files, where.workdir, task.user)
        before = await judge.look(task, box, where.workdir)
        async with async_scratch("rescore") as folder:
            await anyio.to_thread.run_sync(unpack, tar, folder)
            await box.upload_dir(str(folder), where.workdir, user=task.user)
        judged = msgspec.structs.replace(kept, failure=None)
        evidence = Evidence(rollout=judged, sandbox=box, place=place, workdir=where.workdir, before=before)
        return await judge(spec, evidence, deadline)
