"""A task folder for one fault: the package with the fault in it, its tests for the judge, and the repair for the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from rollyard.tasks.adapters.drafts import WORKDIR, write_task
from rollyard.tasks.synthesis.mutations import Mutation
from rollyard.tasks.synthesis.package import PackageSource

SUITE = "suite"  # where the package's tests lie below the judge's tests
PYTEST = "pytest==9.2.0"
_MOST_SHOWN = 5
_LONGEST_ERROR = 200


class SuiteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the package's tests are run: `arguments` leave out those that do not pass without a fault."""

    layer: str
    image: str = "host"
    arguments: tuple[str, ...] = ()
    timeout_s: float = 60.0


def name_task(package: PackageSource, fault: Mutation) -> str:
    return f"{package.name}-{fault.name}"


def write_bug_task(
    folder: Path, package: PackageSource, fault: Mutation, options: SuiteOptions, failing: Mapping[str, str]
) -> None:
    """`failing` are the tests that find the fault, with what each says."""
    extra: dict[str, Any] = {
        "verifier": "pytest",
        "options": pytest_options(package, options),
        "grade": "sealed",
        "layers": [options.layer],
        "verifier_layers": [options.layer],
    }
    faulty = {**package.visible, fault.path: fault.faulty.encode()}
    write_task(
        folder,
        instruction=_describe(package, failing),
        table={
            "metadata": {"package": package.name, "fault": fault.kind, "rollyard": extra},
            "environment": {"workdir": WORKDIR},
            "agent": {"timeout_sec": 900.0},
            "verifier": {"timeout_sec": options.timeout_s + 30.0},
        },
        tests={f"{SUITE}/{path}": data for path, data in package.tests.items()},
        solution={
            "solve.sh": f"#!/bin/sh\ncp '/solution/repaired/{fault.path}' '{WORKDIR}/{fault.path}'\n",
            f"repaired/{fault.path}": fault.original,
            "repair.patch": fault.repair,
        },
        environment={
            "Dockerfile": f"ARG BASE={options.image}\nFROM ${{BASE}}\nWORKDIR {WORKDIR}\nCOPY package/ {WORKDIR}/\n",
            **{f"package/{path}": data for path, data in faulty.items()},
        },
    )


def pytest_options(package: PackageSource, options: SuiteOptions) -> dict[str, Any]:
    """Of the verifier `pytest`."""
    return {
        "paths": [SUITE],
        "pythonpath": [f"{WORKDIR}/{root}".rstrip("/") for root in package.roots],
        "args": [*_import_mode(package), *options.arguments],
        "timeout_s": options.timeout_s,
    }


def _import_mode(package: PackageSource) -> list[str]:
    """Folders of tests below a package are packages of the same name once they lie apart from it: pytest must tell them apart."""
    folders = [PurePosixPath(path).parent.name for path in package.tests if path.endswith("/__init__.py")]
    return ["--import-mode=importlib"] if len(set(folders)) < len(folders) else []


def _describe(package: PackageSource, failing: Mapping[str, str]) -> str:
    by_function = {name.partition("[")[0]: name for name in reversed(list(failing))}  # the first of each
    chosen = [name for name in failing if name in by_function.values()][:_MOST_SHOWN]
    shown = [f"- `{name}`: {failing[name][:_LONGEST_ERROR]}" for name in chosen]
    more = [f"- and {len(failing) - len(chosen)} more"] if len(failing) > len(chosen) else []
    count = "One test of its suite fails" if len(failing) == 1 else f"{len(failing)} tests of its suite fail"
    return "\n".join(
        [
            f"A change has broken the Python package {package.name}, whose source is in {WORKDIR}. {count}:",
            "",
            *shown,
            *more,
            "",
            "Find the fault and repair it in the source. The tests are not here; all of them are run when you are done.",
        ]
    )
