"""Making tasks out of a package: lay a fault into its source, see its tests find it, and prove the task as `check tasks` does.

The package's code runs in sandboxes alone. Faults are tried in an order that the seed gives, and the first that pass are kept, so
that the same seed gives the same tasks, however many are tried at the same time.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from rollyard.core.errors import ConfigError, Error, UnknownName
from rollyard.core.near_path import near_path
from rollyard.core.protocols import Backend
from rollyard.core.scratch import scratch
from rollyard.runs.rollout.provision import Provision
from rollyard.tasks.dataset_registry import unpack_source
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.layers import layer_spec
from rollyard.tasks.synthesis.bug_task import PYTEST, SuiteOptions, name_task, write_bug_task
from rollyard.tasks.synthesis.mutations import KINDS, Mutation, find_mutations
from rollyard.tasks.synthesis.package import PackageSource, read_package
from rollyard.testing.package_suite import PackageSuite, find_stable, open_suite
from rollyard.testing.tasks import CheckOptions, check_task

_MOST_TRIED = 40  # candidates for each task that is wanted, before a package is given up


class MakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`count` is for each package. `packages` are what it and its tests need, as pip names them with their versions. `repeats`
    is how often the tests are seen to pass without a fault and to fail with one; the last times in the task itself."""

    count: int = 50
    seed: int = 0
    kinds: tuple[str, ...] = tuple(KINDS)
    packages: tuple[str, ...] = ()
    image: str = "host"
    repeats: int = 2
    parallel: int = 2
    timeout_s: float = 60.0


class TriedFault(msgspec.Struct, frozen=True, kw_only=True):
    """`reason` says why it is no task; None is a task."""

    name: str
    kind: str
    path: str
    function: str
    failing: int = 0
    reason: str | None = None


class MadeTasks(msgspec.Struct, frozen=True, kw_only=True):
    """`tests` is how many tests judge each task; `left_out` are those that fail or are flaky without any fault. `problem` is why
    the package gives no tasks at all."""

    package: str
    tests: int = 0
    left_out: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    tried: tuple[TriedFault, ...] = ()
    problem: str | None = None


async def make_tasks(
    sources: Sequence[str],
    out: Path,
    backend: Backend,
    options: MakeOptions,
    *,
    tell: Callable[[TriedFault], None] = lambda fault: None,
) -> list[MadeTasks]:
    """Task folders below `out`, of one package after the other. `tell` hears of each fault as it is judged. Of several packages
    one whose tests cannot be used costs its own tasks alone."""
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty", hint="name a new folder")
    suite = SuiteOptions(layer=_layer(options.packages), image=options.image, timeout_s=options.timeout_s)
    packages = [await anyio.to_thread.run_sync(open_package, source) for source in sources]
    orders = [await anyio.to_thread.run_sync(order_faults, package, options) for package in packages]
    if twice := [name for name, count in Counter(package.name for package in packages).items() if count > 1]:
        raise ConfigError(f"{twice[0]} is named twice", hint="name each package once")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error.strerror or error}", hint="name another folder") from error
    done: list[MadeTasks] = []
    for package, order in zip(packages, orders, strict=True):
        try:
            done.append(await _make_of(package, order, out, backend, suite, options, tell))
        except ConfigError as error:
            if len(packages) == 1:
                raise
            done.append(MadeTasks(package=package.name, problem=str(error)))
    return done


async def _make_of(
    package: PackageSource,
    order: Sequence[tuple[int, Mutation]],
    out: Path,
    backend: Backend,
    suite: SuiteOptions,
    options: MakeOptions,
    tell: Callable[[TriedFault], None],
) -> MadeTasks:
    provision = Provision.of(backend)
    async with open_suite(package, suite, backend, provision) as first:
        stable = await find_stable(first, options.repeats)
    suite = msgspec.structs.replace(suite, arguments=stable.arguments)
    waiting, tried = iter(order), dict[int, TriedFault]()

    async def work() -> None:
        async with open_suite(package, suite, backend, provision) as opened:
            for number, fault in waiting:
                tried[number] = await try_fault(fault, opened, out, provision, options)
                tell(tried[number])
                if sum(one.reason is None for one in tried.values()) >= options.count:
                    return

    async with anyio.create_task_group() as group:
        for _ in range(options.parallel):
            group.start_soon(work)
    good = [tried[number].name for number in sorted(tried) if tried[number].reason is None]
    for name in good[options.count :]:
        await anyio.to_thread.run_sync(shutil.rmtree, out / name)
    return MadeTasks(
        package=package.name,
        tests=stable.tests,
        left_out=stable.left_out,
        made=tuple(good[: options.count]),
        tried=tuple(tried[number] for number in sorted(tried)),
    )


def open_package(source: str) -> PackageSource:
    place = Path(source).expanduser()
    if not source.startswith("git:") and not place.exists():
        raise ConfigError(
            f"{place}: no such file or folder",
            hint=near_path(place) or "a checkout, the .tar.gz of an sdist, or git:PATH_OR_URL@COMMIT",
        )
    folder = unpack_source(source)
    if not folder.is_dir():
        raise ConfigError(f"{source}: neither a folder nor an archive", hint="a checkout, or the .tar.gz of an sdist")
    name = Path(source.rpartition("@")[0] or source).name.lower()
    for ending in (".tar.gz", ".tgz", ".zip", ".tar.bz2", ".tar.xz", ".tar", ".git"):
        name = name.removesuffix(ending)
    return read_package(folder, name.replace("_", "-"))


def _layer(packages: Sequence[str]) -> str:
    """pytest, unless one was named, and what else was."""
    named = any(name.startswith("pytest==") for name in packages)
    layer = f"pip:{','.join([*([] if named else [PYTEST]), *packages])}"
    layer_spec(layer)
    return layer


def order_faults(package: PackageSource, options: MakeOptions) -> list[tuple[int, Mutation]]:
    """Faults in the order in which they are tried: by chance, but kinds in turns, and each function once before any twice."""
    for kind in options.kinds:
        if kind not in KINDS:
            raise UnknownName("kind of fault", kind, list(KINDS))
    found: list[Mutation] = []
    for path in package.sources:
        found += find_mutations(path, package.visible[path].decode(), options.kinds)
    random.Random(options.seed).shuffle(found)
    functions, kinds = Counter[tuple[str, str]](), Counter[tuple[int, str]]()
    ranked: list[tuple[int, int, Mutation]] = []
    for fault in found:
        again = functions[fault.path, fault.function]
        ranked.append((again, kinds[again, fault.kind], fault))
        functions[fault.path, fault.function] += 1
        kinds[again, fault.kind] += 1
    ranked.sort(key=lambda one: one[:2])
    return list(enumerate(fault for _, _, fault in ranked[: options.count * _MOST_TRIED]))


async def try_fault(
    fault: Mutation, suite: PackageSuite, out: Path, provision: Provision, options: MakeOptions
) -> TriedFault:
    """The repair is the package as it was, which the tests passed `repeats` times before any fault was tried; the fault is tried
    here once before it is a task."""
    tried = TriedFault(name=name_task(suite.package, fault), kind=fault.kind, path=fault.path, function=fault.function)
    reject = partial(msgspec.structs.replace, tried)
    if not fault.is_sound():  # on the loop's thread: CPython 3.11 parses in one thread at a time, or raises SystemError
        return reject(reason="it means the same, or is no Python")
    found = await suite.run_with(fault)
    if found.problem is not None or not found.failing:
        return reject(reason=found.problem or "no test finds it")
    with scratch("fault") as folder:
        place = folder / tried.name
        await anyio.to_thread.run_sync(write_bug_task, place, suite.package, fault, suite.options, found.failing)
        try:
            task = await anyio.to_thread.run_sync(load_folder, place)
            check = await check_task(task, suite.backend, CheckOptions(repeats=max(1, options.repeats - 1)), provision)
        except Error as error:
            return reject(reason=f"it cannot be run: {error}")
        wrong = [f"{finding.where}: {finding.message}" for finding in check.findings if finding.level == "error"]
        if wrong:
            return reject(reason=" ".join(wrong[0].split())[:200])
        await anyio.to_thread.run_sync(shutil.copytree, place, out / tried.name)
    return reject(failing=len(found.failing))


def tabulate(made: MadeTasks) -> Iterator[dict[str, str]]:
    """One row for each kind of fault, with the reasons for those that are no tasks."""
    for kind in dict.fromkeys(fault.kind for fault in made.tried):
        faults = [fault for fault in made.tried if fault.kind == kind]
        yield {
            "kind": kind,
            "tried": str(len(faults)),
            "made": str(sum(fault.name in made.made for fault in faults)),
            "left out because": _reasons(made, faults),
        }


def tabulate_packages(done: Sequence[MadeTasks]) -> Iterator[dict[str, str]]:
    """One row for each package."""
    for made in done:
        yield {
            "package": made.package,
            "tests": str(made.tests),
            "tried": str(len(made.tried)),
            "made": str(len(made.made)),
            "left out because": made.problem or _reasons(made, made.tried),
        }


def _reasons(made: MadeTasks, faults: Sequence[TriedFault]) -> str:
    left_out = [fault for fault in faults if fault.name not in made.made]
    reasons = Counter((fault.reason or "enough were made").partition(":")[0] for fault in left_out)
    return "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
