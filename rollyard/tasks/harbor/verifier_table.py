"""How a folder says it is judged, with Harbor's rules of inheritance: step over task, an image of its own over the task's.

Harbor's `separate` is a `sealed` verdict that takes only artifacts along; its default is `shared`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.task import CollectHook, Grade, Site, VerifierSpec
from rollyard.tasks.harbor import schema
from rollyard.tasks.harbor.environment_table import COMPOSE, read_site
from rollyard.tasks.harbor.taskfile import TaskFolder, user_name


def read_verifier(load: TaskFolder, step: schema.StepTable | None, field: str) -> VerifierSpec:
    table, extra = load.file.verifier, load.extra
    own = step.verifier if step is not None else table
    separate = own.separate if own.separate is not None else bool(table.separate)
    site, bundled = _own_site(load, step) if separate else (None, False)
    grade: Grade = extra.grade or ("sealed" if separate else "shared")
    if separate and grade != "sealed":
        raise load.fail("metadata.rollyard.grade", f"{grade!r} contradicts a separate verifier environment")
    kind = extra.verifier or "harbor"
    tests = _tests(load, step, field) if kind == "harbor" and not bundled else _test_dirs(load, step)
    network, hosts = load.network(own)
    if network is None and own is not table:
        network, hosts = load.network(table)
    if network is None and site is None and load.file.agent.network_mode is not None:
        network, hosts = load.network(load.file.environment)
    user = own.user if own.user is not None else table.user
    return VerifierSpec(
        kind=kind,
        grade=grade,
        site=site,
        layers=tuple(extra.verifier_layers),
        tests=tests,
        bundled=bundled,
        carry_workdir=extra.carry_workdir if extra.carry_workdir is not None else not separate,
        safe_path=extra.safe_path,
        env={**table.env, **own.env},
        user=user_name(user),
        timeout_s=own.timeout_sec if own.timeout_sec is not None else table.timeout_sec,
        network=network,
        allowed_hosts=hosts,
        collect=tuple(_collect_hook(hook) for hook in (own.collect or table.collect)),
        options=_anchor(load, kind, extra.options),
    )


def _anchor(load: TaskFolder, kind: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """A `python` verifier's file is found beside its task, wherever the task is run from."""
    file, _, name = str(options.get("ref", "")).rpartition(":")
    if kind != "python" or not file.endswith(".py") or Path(file).is_absolute():
        return options
    return {**options, "ref": f"{load.root.absolute() / file}:{name}"}


def _own_site(load: TaskFolder, step: schema.StepTable | None) -> tuple[Site | None, bool]:
    """A separate verifier's place, and whether its image brings the tests. None: a fresh copy of the task's own."""
    task_table = load.file.verifier
    table = (step.verifier.environment if step is not None else None) or task_table.environment
    candidates = [(task_table.environment, load.root / "tests")]
    if step is not None:
        tests = load.root / "steps" / step.name / "tests"
        candidates.insert(0, (step.verifier.environment, tests))
    for environment, tests in candidates:
        image = environment.docker_image if environment is not None else None
        if image is None and not any((tests / name).is_file() for name in ("Dockerfile", *COMPOSE)):
            continue
        described = table or load.file.environment
        site = read_site(load, described, tests)
        if image is not None:
            return msgspec.structs.replace(site, image=image, build=None, compose=None), True
        return msgspec.structs.replace(site, image="host"), True
    if table is None:
        return None, False
    own = read_site(load, table, load.root / "environment")
    return msgspec.structs.replace(own, image=load.extra.image or load.file.environment.docker_image or "host"), False


def _collect_hook(table: schema.CollectTable) -> CollectHook:
    return CollectHook(
        command=table.command, service=table.service, timeout_s=table.timeout_sec, user=user_name(table.user)
    )


def _test_dirs(load: TaskFolder, step: schema.StepTable | None) -> tuple[str, ...]:
    directories = [load.root / "tests"]
    if step is not None:
        directories.append(load.root / "steps" / step.name / "tests")
    return tuple(str(directory) for directory in directories if directory.is_dir())


def _tests(load: TaskFolder, step: schema.StepTable | None, field: str) -> tuple[str, ...]:
    directories = _test_dirs(load, step)
    scripts = [Path(directory) / "test.sh" for directory in directories]
    present = [script for script in scripts if script.is_file()]
    if not present:
        wanted = "tests/test.sh" if step is None else f"steps/{step.name}/tests/test.sh or tests/test.sh"
        raise load.fail(field, f"the task has no {wanted}")
    if all(load.files.excludes(script) for script in present):
        raise load.fail(field, f"{present[-1].relative_to(load.root)} is excluded by .harborignore")
    for directory in directories:
        for _ in load.files.walk(Path(directory)):
            pass  # refuses links that lead out of the task
    return directories
