"""Checking tasks: lint, then proof by running. Doing nothing must fail, the task's own solution must pass, and both must do so
every time.

Each proof is an ordinary rollout of the agents `nop` and `oracle` through the one lifecycle, so what is checked is what will
be run.
"""

from __future__ import annotations

import errno
import math
from collections.abc import AsyncGenerator, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec

from rollyard.core.egress import parse_build_network, parse_network_option
from rollyard.core.errors import Error
from rollyard.core.protocols import Backend, RemovesStates
from rollyard.core.rollout import Rollout
from rollyard.core.scratch import scratch
from rollyard.core.task import Task
from rollyard.policy.scripted_policy import scripted
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.tasks.adapters.drafts import folder_name
from rollyard.tasks.harbor.load import is_task
from rollyard.tasks.lint import TaskFinding, lint, size_of
from rollyard.tasks.taskset import Taskset, load_folders
from rollyard.tasks.verifiers.sandbox import LOGS
from rollyard.testing.leaks import find_leaks
from rollyard.testing.trivial_answers import trivial_answers

_LOG_TAIL = 1500
_PRINTED = "verdict.log"
_BAD_NAME = (errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTDIR)


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent got out of the task, every time it was tried; None where there was no reward."""

    agent: Literal["nop", "oracle"]
    rewards: tuple[float | None, ...]
    seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]
    problems: tuple[str, ...] = ()

    @property
    def flaky(self) -> bool:
        return len(set(self.rewards)) > 1


class TaskCheck(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    digest: str
    ok: bool
    files: int
    bytes: int
    findings: tuple[TaskFinding, ...]
    proofs: tuple[Proof, ...] = ()

    @property
    def flaky(self) -> bool:
        return any(proof.flaky for proof in self.proofs)


class CheckOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`repeats` is how often each agent tries; 0 means lint only."""

    repeats: int = 2
    parallel: int = 2
    network: str = "task"
    build_network: str | None = None
    pull: tuple[str, ...] = ()
    logs: Path | None = None  # where all that verifiers wrote is kept
    trust_tasks: bool = False
    allow_unsafe: bool = False
    filter: str | None = None
    trivial: bool = False  # answers that know nothing of the task are tried too
    keep_built: bool = True  # False: what was built for a task is removed once no other of the tasks begins with it

    def __post_init__(self) -> None:
        parse_network_option(self.network)
        if self.build_network is not None:
            parse_build_network(self.build_network)


def load_each(source: str, options: CheckOptions) -> tuple[list[Task], list[TaskCheck]]:
    """Every task of `source` that loads, and a failed check for each folder that does not."""
    root = Path(source)
    if not root.is_dir() or is_task(root) or (root / "dataset.toml").is_file():
        found = Taskset.load(source, trust_tasks=options.trust_tasks)
        return list(found.filter(options.filter) if options.filter else found), []
    tasks, skipped = load_folders(root, trust_tasks=options.trust_tasks)
    broken: list[TaskCheck] = []
    for folder, reason in skipped:
        finding = TaskFinding(level="error", where="task.toml", message=reason)
        name = Path(folder).name
        broken.append(TaskCheck(task_id=name, digest="", ok=False, files=0, bytes=0, findings=(finding,)))
    chosen = Taskset(tasks, name=root.name)
    return list(chosen.filter(options.filter) if options.filter else chosen), broken


async def check_tasks(source: str, backend: Backend, options: CheckOptions | None = None) -> AsyncGenerator[TaskCheck]:
    """One outcome per task, as each is ready."""
    options = options or CheckOptions()
    tasks, broken = await anyio.to_thread.run_sync(load_each, source, options)
    for outcome in broken:
        yield outcome
    async for outcome in check_each(tasks, backend, options, Provision.of(backend)):
        yield outcome


async def check_each(
    tasks: Sequence[Task], backend: Backend, options: CheckOptions, provision: Provision
) -> AsyncGenerator[TaskCheck]:
    send, receive = anyio.create_memory_object_stream[TaskCheck](len(tasks) or 1)
    limiter = anyio.CapacityLimiter(options.parallel)
    builds = None if options.keep_built else _Builds(tasks, backend)

    async def one(number: int, task: Task) -> None:
        async with limiter:
            own = provision if builds is None else Provision.of(backend)
            check = await check_task(task, backend, options, own)
            if builds is not None:
                await builds.give_back(number, own.made_states)
            await send.send(check)

    async with anyio.create_task_group() as group:
        for number, task in enumerate(tasks):
            group.start_soon(one, number, task)
        for _ in tasks:
            yield await receive.receive()
    send.close()
    receive.close()


class _Builds:
    """What was built for tasks of one check, until no task that is still to be judged begins with it."""

    def __init__(self, tasks: Sequence[Task], backend: Backend) -> None:
        self._backend = backend
        self._provision = Provision.of(backend)
        self._left = dict(enumerate(tasks))
        self._foreseen: dict[int, frozenset[str]] = {}
        self._made: set[str] = set()

    async def give_back(self, number: int, made: Collection[str]) -> None:
        """The task of this number is judged, and `made` was built for it."""
        del self._left[number]
        self._made |= set(made)
        if not self._made or not isinstance(self._backend, RemovesStates):
            return
        for other, task in list(self._left.items()):
            if other not in self._foreseen:
                self._foreseen[other] = frozenset(await self._provision.foresee_states(task, self._backend))
        gone = self._made.difference(*(self._foreseen[other] for other in self._left))
        await self._backend.remove_states(gone)
        self._made -= gone


async def check_task(task: Task, backend: Backend, options: CheckOptions, provision: Provision) -> TaskCheck:
    findings = await anyio.to_thread.run_sync(lint, task)
    files, size = await anyio.to_thread.run_sync(size_of, task)
    proofs: list[Proof] = []
    if options.repeats and not any(finding.level == "error" for finding in findings):
        proofs.append(await _prove("nop", task, backend, options, provision))
        if task.solution is not None or (task.steps and all(step.solution for step in task.steps)):
            proofs.append(await _prove("oracle", task, backend, options, provision))
        findings += _judge(proofs)
        findings += await find_leaks(
            task,
            backend,
            provision,
            network=options.network,
            build_network=options.build_network,
            pull=options.pull,
            allow_unsafe=options.allow_unsafe,
        )
        if options.trivial:
            findings += await _try_trivial(task, backend, options, provision)
    return TaskCheck(
        task_id=task.id,
        digest=task.digest,
        ok=not any(finding.level == "error" for finding in findings),
        files=files,
        bytes=size,
        findings=tuple(findings),
        proofs=tuple(proofs),
    )


async def _prove(
    agent: Literal["nop", "oracle"], task: Task, backend: Backend, options: CheckOptions, provision: Provision
) -> Proof:
    rollouts: list[Rollout] = []
    problems: list[str] = []
    for number in range(options.repeats):
        try:
            done = await run_rollout(
                task,
                agent=agent,
                policy=scripted([]),
                sandbox=backend,
                provision=provision,
                network=options.network,
                build_network=options.build_network,
                pull=options.pull,
                allow_unsafe=options.allow_unsafe,
                collect=[f"{LOGS}/*"] if options.logs is not None else [],
            )
        except Error as error:
            return Proof(agent=agent, rewards=(None,), seconds=(0.0,), verify_seconds=(0.0,), problems=(str(error),))
        rollouts.append(done)
        problems += _problems(done)
        if options.logs is not None:
            await anyio.to_thread.run_sync(
                _write_logs, options.logs / f"{folder_name(task.id)}.{agent}.{number + 1}", done
            )
    return Proof(
        agent=agent,
        rewards=tuple(done.reward for done in rollouts),
        seconds=tuple(round(done.wall_s, 3) for done in rollouts),
        verify_seconds=tuple(
            round(math.fsum(s.duration_s for s in done.stages if s.name == "verify"), 3) for done in rollouts
        ),
        problems=tuple(dict.fromkeys(problems)),
    )


async def _try_trivial(task: Task, backend: Backend, options: CheckOptions, provision: Provision) -> list[TaskFinding]:
    """Answers that know nothing of the task, each given once as if it were the solution."""
    found: list[TaskFinding] = []
    for kind, script in trivial_answers(task).items():
        with scratch("answer") as folder:
            await anyio.to_thread.run_sync((folder / "solve.sh").write_text, script)
            answer = msgspec.structs.replace(task, solution=str(folder), solution_env={})
            once = msgspec.structs.replace(options, repeats=1, logs=None)  # they are the solution's
            proof = await _prove("oracle", answer, backend, once, provision)
        if proof.rewards[0] is not None and proof.rewards[0] >= 1.0:
            message = f"{kind} answer solves the task: its tests do not look at what was asked for"
            found.append(TaskFinding(level="error", where="trivial", message=message))
    return found


def _write_logs(folder: Path, done: Rollout) -> None:
    """What the verifier printed, as far as it is kept, and the files that it wrote, whole. It may have been written by a
    stranger: no name of a file leads out of the folder, and one that cannot be a name here is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _PRINTED).write_text(done.verdict.log if done.verdict is not None else "", errors="backslashreplace")
    for path, data in done.files.items():
        names = path.removeprefix(f"{LOGS}/").split("/")
        if not path.startswith(f"{LOGS}/") or not {"", ".", ".."}.isdisjoint(names):
            continue
        if names[0] == _PRINTED:
            names[0] = f"{_PRINTED}.written"
        try:
            file = folder.joinpath(*names)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        except OSError as error:
            if error.errno not in _BAD_NAME:
                raise


def _problems(done: Rollout) -> list[str]:
    said: list[str] = []
    if done.failure is not None:
        said.append(f"{done.failure.stage}: {done.failure.message}")
    if done.verdict is not None and done.verdict.error is not None:
        said.append(f"verifier: {done.verdict.error}")
    wrong = done.reward is None or (done.agent == "oracle" and done.reward < 1.0)
    if wrong and done.verdict is not None and done.verdict.log.strip():
        said.append(f"its log ends: {done.verdict.log.strip()[-_LOG_TAIL:]}")
    return said


def _judge(proofs: Sequence[Proof]) -> list[TaskFinding]:
    found: list[TaskFinding] = []

    def error(proof: Proof, message: str) -> None:
        details = f": {'; '.join(proof.problems)}" if proof.problems else ""
        found.append(TaskFinding(level="error", where=proof.agent, message=f"{message}{details}"))

    for proof in proofs:
        rewards = [reward for reward in proof.rewards if reward is not None]
        if len(rewards) < len(proof.rewards):
            error(proof, f"got no reward in {len(proof.rewards) - len(rewards)} of {len(proof.rewards)} tries")
        elif proof.flaky:
            error(proof, f"got different rewards for the same work: {sorted(set(rewards))}")
        elif proof.agent == "nop" and max(rewards) >= 1.0:
            error(proof, "solves the task by doing nothing")
        elif proof.agent == "oracle" and min(rewards) < 1.0:
            error(proof, f"the task's own solution gets {min(rewards):g}")
    return found


def as_table(checks: Sequence[TaskCheck]) -> list[dict[str, Any]]:
    """Plain rows for people: one per task."""
    rows: list[dict[str, Any]] = []
    for check in checks:
        by_agent = {proof.agent: proof for proof in check.proofs}
        rows.append(
            {
                "task": check.task_id,
                "result": "flaky" if check.flaky else "ok" if check.ok else "failed",
                "nop": _rewards(by_agent.get("nop")),
                "oracle": _rewards(by_agent.get("oracle")),
                "seconds": f"{max((max(p.seconds) for p in check.proofs), default=0.0):.1f}",
                "verify": f"{max((max(p.verify_seconds) for p in check.proofs), default=0.0):.1f}",
                "size": f"{check.files} files, {check.bytes / 1024:.0f} kB",
            }
        )
    return rows


def _rewards(proof: Proof | None) -> str:
    if proof is None:
        return "-"
    return "/".join(sorted({"none" if reward is None else f"{reward:g}" for reward in proof.rewards}))
