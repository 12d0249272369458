"""A package's own tests in a sandbox: run as the verifier `pytest` will run them, on the package as it is and with faults."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Backend, Sandbox
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.sandbox import DEFAULT_PATH, SandboxSpec
from rollyard.core.scratch import scratch
from rollyard.core.task import Task, VerifierSpec
from rollyard.images.layers import layer_prefix
from rollyard.runs.rollout.provision import Provision
from rollyard.tasks.adapters.drafts import WORKDIR
from rollyard.tasks.synthesis.bug_task import SUITE, SuiteOptions, pytest_options
from rollyard.tasks.synthesis.mutations import Mutation
from rollyard.tasks.synthesis.package import PackageSource
from rollyard.tasks.verifiers import verifier_for
from rollyard.tasks.verifiers.runner import RunnerNotStarted
from rollyard.tasks.verifiers.sandbox import LOGS, TESTS

# Paths from where pytest was started
_SAID = re.compile(rf"^(FAILED|ERROR) (?:\S*?/)?{SUITE}/(.+?)(?: - (.*))?$", re.M)
_MOST_LEFT_OUT = 200
_ROUNDS = 5
_COLUMNS = "1000"  # so that pytest cuts no line of its summary
_LONGEST_S = 6 * 3600.0
_CLEAR = f"find {WORKDIR} -name __pycache__ -prune -exec rm -rf {{}} + ; rm -rf {LOGS} && mkdir -p {LOGS}"


class SuiteRun(msgspec.Struct, frozen=True, kw_only=True):
    """`failing` are tests with what they say. `problem`: the suite did not run to its end."""

    tests: int
    failing: dict[str, str]
    problem: str | None = None


class StableSuite(msgspec.Struct, frozen=True, kw_only=True):
    """The tests of a suite that pass each time: `arguments` of pytest leave the others out."""

    tests: int
    left_out: tuple[str, ...]
    arguments: tuple[str, ...]


class PackageSuite:
    """A sandbox with the package and its tests in it."""

    def __init__(self, package: PackageSource, options: SuiteOptions, backend: Backend, sandbox: Sandbox) -> None:
        self.package, self.options, self.backend, self._sandbox = package, options, backend, sandbox

    async def run_with(self, fault: Mutation) -> SuiteRun:
        place = f"{WORKDIR}/{fault.path}"
        await self._sandbox.write(place, fault.faulty.encode())
        try:
            return await self.run(self.options)
        finally:
            await self._sandbox.write(place, fault.original.encode())

    async def run(self, options: SuiteOptions) -> SuiteRun:
        task = Task(id=self.package.name, instruction="")
        spec = VerifierSpec(kind="pytest", bundled=True, options=pytest_options(self.package, options))
        # Code of the last run, whose file may have the same size and second
        await self._sandbox.exec(_CLEAR, timeout=60)
        try:
            verdict = await verifier_for(spec)(self._sandbox, Rollout(id=task.id, task=task))
        except RunnerNotStarted as error:
            return SuiteRun(tests=0, failing={}, problem=f"its tests do not start: {error.message}")
        return _read(verdict)


def _read(verdict: Verdict) -> SuiteRun:
    said = {match[2]: (match[1], match[3] or "") for match in _SAID.finditer(verdict.log)}
    failing = {name: error for name, (_, error) in said.items() if "::" in name}
    problem = None
    if verdict.error is not None:
        problem = "its tests do not end"
    elif broken := [f"{name} {error}" for name, (kind, error) in said.items() if kind == "ERROR" and "::" not in name]:
        failing = {name: error for name, (_, error) in said.items()}
        problem = f"its tests cannot be imported: {broken[0]}"
    elif verdict.reward != 1.0 and not failing:
        problem = "its tests say nothing of what failed"
    return SuiteRun(tests=len(verdict.checks), failing=failing, problem=problem)


@asynccontextmanager
async def open_suite(
    package: PackageSource, options: SuiteOptions, backend: Backend, provision: Provision
) -> AsyncGenerator[PackageSuite]:
    if not backend.capabilities.layers:
        raise ConfigError(
            f"backend {backend.name!r} mounts no layers, which the tests' tools are", hint="--sandbox local"
        )
    (layer,) = await provision.layers((options.layer,), Task(id=package.name, instruction=""), backend)
    env = {"PATH": f"{layer_prefix(layer)}/bin:{DEFAULT_PATH}", "COLUMNS": _COLUMNS}
    spec = SandboxSpec(image=options.image, layers=(layer,), workdir=WORKDIR, env=env, ttl_s=_LONGEST_S)
    with scratch("package") as folder:
        await anyio.to_thread.run_sync(_lay_out, folder, package)
        async with backend.open(spec) as sandbox:
            await sandbox.upload_dir(str(folder / "package"), WORKDIR)
            await sandbox.upload_dir(str(folder / "tests"), TESTS)
            yield PackageSuite(package, options, backend, sandbox)


def _lay_out(folder: Path, package: PackageSource) -> None:
    for place, files in ((folder / "package", package.visible), (folder / "tests" / SUITE, package.tests)):
        for name, data in files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


async def find_stable(suite: PackageSuite, repeats: int) -> StableSuite:
    """The tests that pass without a fault, every time. Each round leaves out what failed in the last one."""
    left_out: dict[str, str] = {}
    options, passed, found = suite.options, 0, SuiteRun(tests=0, failing={})
    for _ in range(repeats + _ROUNDS):
        found = await suite.run(options)
        if found.problem is None and not found.failing:
            passed += 1
            if passed == repeats:
                break
            continue
        if not found.failing:
            if left_out:  # and no test beside them
                break
            raise ConfigError(f"{suite.package.name}: {found.problem}", hint="--test-timeout gives its tests more time")
        passed = 0
        left_out |= found.failing
        arguments = tuple(_leave_out(name) for name in sorted(left_out))
        options = msgspec.structs.replace(options, arguments=arguments)
        if len(left_out) > _MOST_LEFT_OUT:
            break
    if passed < repeats or not found.tests:
        name, error = next(iter(left_out.items()), ("none", found.problem or "no test is left"))
        raise ConfigError(
            f"{suite.package.name}: too few of its tests pass without a fault; the first, {name}: {error}",
            hint="--with NAME==VERSION installs what it needs beside pytest",
        )
    return StableSuite(tests=found.tests, left_out=tuple(sorted(left_out)), arguments=options.arguments)


def _leave_out(name: str) -> str:
    """pytest knows tests by their place below its root, and files by their path."""
    return f"--deselect={SUITE}/{name}" if "::" in name else f"--ignore={TESTS}/{SUITE}/{name}"
