"""Judging what an agent left, in one of three grades.

- `sealed`: a fresh sandbox from the pristine image (or the verifier's own); only the working directory and the declared
  artifacts come along. Nothing the agent did to the system, to tools or to start-up files can matter.
- `shared`: the agent's own file system after every process in it is dead, with clean defaults (`verifiers/sandbox.py`),
  the reward and test paths made anew, and the verifier's tools from read-only layers. System files the agent replaced are
  still replaced.
- `live`: as shared, but processes stay. Only for a task that declares it, and the verdict says so.

The caller has revoked the agent's key before. A sandbox that breaks raises its own error: an infrastructure failure is
never a reward. A verifier that cannot run gives reward None.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

import anyio
import msgspec

from rollyard.core.errors import CommandFailed, PathError, SandboxError, VerifierError
from rollyard.core.protocols import Backend, Sandbox, Verifier
from rollyard.core.rollout import CommandRecord, Rollout, Verdict
from rollyard.core.sandbox import Network, SandboxSpec
from rollyard.core.scratch import async_scratch
from rollyard.core.task import Artifact, VerifierSpec
from rollyard.tasks import planted_files, transfer
from rollyard.tasks.planted_files import StateBefore
from rollyard.tasks.python_startup import KnownFiles
from rollyard.tasks.verifiers.runner import RunnerNotStarted
from rollyard.tasks.verifiers.sandbox import HOME, LOGS, TESTS, VerifierSandbox, clean_env

_TTL_MARGIN_S = 120.0
_OWN_S = 30.0
_PRELOAD = "/etc/ld.so.preload"
_SPARE_S = 5.0

Forget = Callable[[str], Awaitable[object]]
Prepare = Callable[[Sandbox], Awaitable[object]]


class Judging(msgspec.Struct, frozen=True, kw_only=True):
    """One judging. `place` is how the agent's sandbox was opened, from the pristine image; `site` a place of the verifier's
    own, image built. `layers` are ids of read-only tools for the verifier alone, `tools` their bin directories; `image_env` is
    the pristine image's environment, `env` the verifier's own, resolved. `collected` are collect hooks that ran already; None:
    they run here. `before` is what was seen before the agent started; a sealed verdict without it looks at the pristine image.
    `known` are files that were read before, in other rollouts too.
    """

    spec: VerifierSpec
    rollout: Rollout
    place: SandboxSpec
    workdir: str
    artifacts: tuple[Artifact, ...] = ()
    site: SandboxSpec | None = None
    agent_user: str | None = None
    layers: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    image_env: Mapping[str, str] = {}
    env: Mapping[str, str] = {}
    timeout_s: float = 600.0
    collected: tuple[CommandRecord, ...] | None = None
    before: StateBefore | None = None
    known: KnownFiles = msgspec.field(default_factory=KnownFiles)
    record: Callable[[CommandRecord], None] | None = None  # told each command of the verifier's when it has ended
    keep: Callable[[Sandbox], Awaitable[None]] | None = None  # shown the verifier's sandbox when it has judged

    @property
    def network(self) -> tuple[Network, tuple[str, ...]]:
        """The verifier's own word, else its site's, else the agent's."""
        for network, hosts in (
            (self.spec.network, self.spec.allowed_hosts),
            ((self.site.network, self.site.allowed_hosts) if self.site is not None else (None, ())),
        ):
            if network == "none" or network == "allowlist" or network == "host":
                return network, hosts
        return self.place.network, self.place.allowed_hosts


async def judge(
    case: Judging,
    sandbox: Sandbox,
    backend: Backend,
    verifier: Verifier,
    *,
    forget: Forget | None = None,
    prepare: Prepare | None = None,
) -> Verdict:
    """The verdict, with its grade. `forget` removes a snapshot that judging made; `prepare` makes a fresh sandbox what it was
    when the agent started (the task's files and setup)."""
    failure = case.rollout.failure
    if failure is not None and not failure.grade:
        return Verdict(status="skipped", error=f"not judged: {failure.message}")
    records = case.collected if case.collected is not None else await collect(case.spec, sandbox, case.workdir)
    if case.spec.grade != "live":
        await sandbox.kill_processes()
    async with AsyncExitStack() as stack:
        if case.spec.grade == "sealed":
            box, notes, before = await _seal(case, sandbox, backend, stack)
        else:
            reopen = case.spec.grade == "shared" and _must_reopen(case)
            where = await _reopen(case, sandbox, backend, stack, forget) if reopen else sandbox
            box, notes, before = _wrap(case, where, case.place), [], case.before
        await _remove_paths(case, box)
        if not await is_directory(box.sandbox, box.cwd):
            notes.append(f"{box.cwd} is no directory any more: the verifier runs in /")
            box.cwd = "/"
        now = await _remove_links(case, box, before, notes) if before is not None else None
        await _make_paths(case, box)
        if before is not None and now is not None:
            notes += await planted_files.put_back(box.sandbox, before, now, case.known)
            await _guard(case, box, before)
        verdict = await _run(case, box, backend, verifier, prepare)
        if case.keep is not None:
            await case.keep(box.sandbox)
        if box.sandbox is sandbox and case.rollout.task.steps:
            await _clear_away(case, sandbox)
    return msgspec.structs.replace(
        verdict,
        grade=case.spec.grade,
        safe_path=case.spec.safe_path,
        commands=(*records, *verdict.commands),
        log="\n".join((*notes, verdict.log)) if notes else verdict.log,
    )


async def collect(spec: VerifierSpec, sandbox: Sandbox, workdir: str) -> tuple[CommandRecord, ...]:
    """Hooks that save run-time state into files, before anything is killed. One that fails is recorded, not fatal."""
    records: list[CommandRecord] = []
    cwd = workdir if not spec.collect or await is_directory(sandbox, workdir) else "/"
    for hook in spec.collect:
        done = await sandbox.exec(hook.command, cwd=cwd, user=hook.user, timeout=hook.timeout_s)
        records.append(CommandRecord.of(hook.command, done))
    return tuple(records)


def _wrap(case: Judging, sandbox: Sandbox, place: SandboxSpec) -> VerifierSandbox:
    """Programs run as the user the task names, else as the image's own; never as the agent's, where it has one of its own."""
    env = clean_env({**case.image_env, **place.env}, case.tools, case.env, safe_path=case.spec.safe_path)
    other = case.agent_user is not None and place is case.place and sandbox.capabilities.users
    user = case.spec.user or ("0" if other else place.user)
    return VerifierSandbox(sandbox, env=env, cwd=case.workdir, user=user, record=case.record)


def _judge_spec(case: Judging, place: SandboxSpec, image: str, layers: tuple[str, ...]) -> SandboxSpec:
    network, hosts = case.network
    return msgspec.structs.replace(
        place,
        image=image,
        layers=tuple(dict.fromkeys((*layers, *case.layers))),
        network=network,
        allowed_hosts=hosts,
        labels={**case.place.labels, "rollyard.role": "verifier"},
        ttl_s=case.timeout_s + _TTL_MARGIN_S,
        lifetime="owner",
    )


def describe_fresh(case: Judging) -> SandboxSpec:
    """A sandbox that the agent has never seen, from the pristine image or the verifier's own."""
    place = msgspec.structs.replace(case.site or case.place, volumes=())  # what is in them is the agent's doing too
    return _judge_spec(case, place, place.image, place.layers)


async def _seal(
    case: Judging, sandbox: Sandbox, backend: Backend, stack: AsyncExitStack
) -> tuple[VerifierSandbox, list[str], StateBefore]:
    if case.spec.carry_workdir and case.workdir.rstrip("/") == "":
        raise VerifierError(
            "a sealed verdict takes the working directory along, and this task's is /",
            hint="set environment.workdir, or declare artifacts with carry_workdir = false",
        )
    workdir = case.workdir if case.spec.carry_workdir else None
    async with async_scratch("judge") as folder:
        load = await transfer.take(sandbox, transfer.choose_artifacts(workdir, case.artifacts, case.workdir), folder)
        fresh = await stack.enter_async_context(backend.open(describe_fresh(case)))
        before = await planted_files.look_pristine(fresh, case.workdir, case.before, case.known)
        await transfer.put(load, fresh, user=case.agent_user)
    return await _wrap_fresh(case, fresh), list(load.notes), before


def _folders_to_judge(case: Judging) -> list[str]:
    """The directories that tests look at: the working directory and what the task declares."""
    chosen = transfer.choose_artifacts(case.workdir, case.artifacts, case.workdir)
    return [artifact.source for artifact in chosen]


async def _remove_links(
    case: Judging, box: VerifierSandbox, before: StateBefore, notes: list[str]
) -> planted_files.StateAfter:
    """How things are without the agent's links; a note for each link."""
    places = _folders_to_judge(case)
    now = await planted_files.look_again(box.sandbox, before, case.workdir, places)
    if not (removed := await planted_files.remove_links(box.sandbox, before, now, places)):
        return now
    notes += removed
    return await planted_files.look_again(box.sandbox, before, case.workdir, places)


async def _guard(case: Judging, box: VerifierSandbox, before: StateBefore) -> None:
    if not case.spec.safe_path:
        return
    task = case.rollout.task
    texts = (task.instruction, *(step.instruction for step in task.steps))
    await planted_files.guard_modules(box.sandbox, before, case.workdir, texts, box.user)


async def _wrap_fresh(case: Judging, fresh: Sandbox) -> VerifierSandbox:
    """A sandbox that the agent has never seen, with a directory to work in."""
    place = case.site or case.place
    box = _wrap(case, fresh, place)
    box.cwd = case.site.workdir if case.site is not None and case.site.workdir else case.workdir
    if not await fresh.exists(box.cwd):
        await fresh.mkdir(box.cwd, user=box.user)
    return box


def _must_reopen(case: Judging) -> bool:
    """Layers and the network are fixed when a sandbox opens; to change them the file system is opened again."""
    missing = [layer for layer in case.layers if layer not in case.place.layers]
    return bool(missing) or case.network != (case.place.network, case.place.allowed_hosts)


async def _reopen(
    case: Judging, sandbox: Sandbox, backend: Backend, stack: AsyncExitStack, forget: Forget | None
) -> Sandbox:
    if not backend.capabilities.snapshot:
        raise VerifierError(
            f"backend {backend.name!r} cannot reopen a file system, which the verifier's layers or network need",
            hint="use grade = 'sealed'",
        )
    image = await sandbox.snapshot()
    if forget is not None:
        stack.push_async_callback(_forget, forget, image)
    return await stack.enter_async_context(backend.open(_judge_spec(case, case.place, image, ())))


async def _forget(forget: Forget, image: str) -> None:
    with anyio.move_on_after(30, shield=True):
        await forget(image)


def _own_paths(case: Judging) -> tuple[str, ...]:
    return (*(() if case.spec.bundled else (TESTS,)), LOGS, HOME)


async def _remove_paths(case: Judging, box: VerifierSandbox) -> None:
    """Test, reward and home directories, and links in their place, are gone; and so is what every program would load."""
    if case.spec.grade != "sealed" and await _kind(box.sandbox, _PRELOAD) is not None:
        await box.sandbox.remove(_PRELOAD)
    for path in ("/logs", *_own_paths(case)):
        kind = await _kind(box.sandbox, path)
        if kind is not None and not (path == "/logs" and kind == "dir"):
            await box.sandbox.remove(path)


async def _make_paths(case: Judging, box: VerifierSandbox) -> None:
    """Test, reward and home directories that did not exist a moment ago, owned by the verifier's user."""
    sandbox = box.sandbox
    for path in _own_paths(case):
        await sandbox.mkdir(path, mode=0o755, user=box.user)
        if await _kind(sandbox, path) != "dir":
            raise SandboxError(f"{path} could not be made anew for the verifier")
    if case.agent_user is not None and sandbox.capabilities.users:
        # renaming a directory takes rights on its parent, which the agent's user may have been given
        await sandbox.exec("chown 0:0 /logs && chmod 755 /logs", cwd="/", user="0", timeout=_OWN_S)


async def _clear_away(case: Judging, sandbox: Sandbox) -> None:
    """The next step's agent works in this very sandbox, and must find neither the tests nor their results."""
    if case.spec.grade == "shared":
        await sandbox.kill_processes()
    for path in (TESTS, LOGS, HOME):
        if await _kind(sandbox, path) is not None:
            await sandbox.remove(path)


async def is_directory(sandbox: Sandbox, path: str) -> bool:
    """Whether programs can run in `path`; an agent may have put anything in its place."""
    kind = await _kind(sandbox, path)
    if kind != "symlink":
        return kind == "dir"
    try:
        await sandbox.list_dir(path)
    except PathError:
        return False
    return True


async def _kind(sandbox: Sandbox, path: str) -> str | None:
    try:
        return (await sandbox.stat(path)).kind
    except PathError:
        return None


async def _run(
    case: Judging, box: VerifierSandbox, backend: Backend, verifier: Verifier, prepare: Prepare | None
) -> Verdict:
    until = anyio.current_time() + case.timeout_s
    try:
        with anyio.fail_after(case.timeout_s):
            return await verifier(box, case.rollout)
    except TimeoutError:
        return Verdict(status="failed", error=f"the verifier took longer than {case.timeout_s:g} s (limits.verify)")
    except RunnerNotStarted as missing:
        # a runner that cannot start says so at once: one for which there is no time left was held up by the agent's files
        with anyio.move_on_after(until - _SPARE_S - anyio.current_time()):
            if (cause := await _fails_untouched(case, backend, verifier, prepare)) is not None:
                error = f"the test runner cannot start, on the untouched image as little as here: {cause}"
                return msgspec.structs.replace(missing.verdict, reward=None, parts={}, status="failed", error=error)
        return missing.verdict
    except (VerifierError, CommandFailed) as error:
        return Verdict(status="failed", error=str(error))


async def _fails_untouched(case: Judging, backend: Backend, verifier: Verifier, prepare: Prepare | None) -> str | None:
    """Why the same tests do not start where no agent has been; None: they do."""
    async with backend.open(describe_fresh(case)) as fresh:
        box = await _wrap_fresh(case, fresh)
        if prepare is not None:
            await prepare(fresh)
        await _remove_paths(case, box)
        await _make_paths(case, box)
        try:
            await verifier(box, case.rollout)
        except RunnerNotStarted as missing:
            return missing.cause
    return None
