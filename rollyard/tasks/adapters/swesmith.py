"""SWE-smith from its git repositories (`swesmith/OWNER__NAME.HASH`): one branch is one instance, of three commits.

The first commit is the repository as it should be, the second has a fault, the third lacks the files of tests that find it. The
agent gets the tree of the third as one commit, so that neither the fault's patch nor the commits' texts are to be found. The
judge runs the suite of the first commit in its own tree and in the agent's: what passes in the one must pass in the other. The
solution is the fault's patch, reversed.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.inside.suite_check import SETTINGS
from rollyard.tasks.adapters import Adapter, TaskDraft
from rollyard.tasks.adapters.drafts import is_test, is_wanted, reward_script, write_task
from rollyard.tasks.adapters.git_trees import ONE_COMMIT, changed_files, is_repository, pack_tree, read_tree, run_git

_WORKDIR = "/testbed"
_BRANCH = re.compile(r"(?P<repo>[^/]+__[^/]+?\.[0-9a-f]{8})\.[^/]+")
_CHECK = "suite_check.py"
_JUDGES = (_CHECK, "run_tests.py", "pytest_witness.py")
_PYTEST = "pytest==8.4.1"
_TIMEOUT_S = 1800.0


def recognise(source: Path) -> bool:
    return source.is_dir() and is_repository(source) and bool(_branches(source))


def read(source: Path, options: Mapping[str, Any]) -> Iterator[TaskDraft]:
    """`instances` are globs over branches; `packages` are what the suite needs, as pip names them, with commas between;
    `arguments` are further ones of pytest."""
    if not is_repository(source):
        raise ConfigError(f"{source}: not a git repository", hint="clone it with all of its branches")
    for name, commit in _branches(source).items():
        if is_wanted(name, options):
            yield TaskDraft(name, partial(_write, source, name, commit, options))


def _branches(repository: Path) -> dict[str, str]:
    """Each instance's branch, of this repository or of the one that it was cloned from, and its commit."""
    listed = run_git(repository, "for-each-ref", "--format=%(objectname) %(refname)", "refs/heads", "refs/remotes")
    found: dict[str, str] = {}
    for line in listed.decode("utf-8", "surrogateescape").splitlines():
        commit, _, ref = line.partition(" ")
        name = ref.rpartition("/")[2]
        if _BRANCH.fullmatch(name):
            found[name] = commit
    return dict(sorted(found.items()))


def _write(repository: Path, name: str, tip: str, options: Mapping[str, Any], folder: Path) -> None:
    commits = run_git(repository, "rev-list", "--first-parent", tip).decode().split()
    if len(commits) != 3:
        raise ConfigError(f"{name}: an instance's branch has three commits, this one has {len(commits)}")
    original, faulty, given = (read_tree(repository, commit) for commit in reversed(commits))
    fault, finding = set(changed_files(original, faulty)), list(changed_files(faulty, given))
    if not fault or not all(path in faulty and path not in given for path in finding):
        raise ConfigError(f"{name}: its second commit must lay a fault, and its third only remove tests")
    if not finding:
        raise ConfigError(f"{name}: its third commit removes no test, so that none finds the fault")
    patch = run_git(repository, "diff", "--no-ext-diff", "--no-textconv", "--binary", commits[2], commits[1])
    layer = f"pip:{','.join(_packages(options))}"
    roots = ["src", "."] if any(path.startswith("src/") for path in original) else ["."]
    plan = {
        "roots": roots,
        "arguments": str(options.get("arguments", "")).split(),
        "finding": finding,
        "judges": [path for path in original if path not in fault and (is_test(path) or path in SETTINGS)],
    }
    repo = name.partition(".")[0].replace("__", "/", 1)
    inside = importlib.resources.files("rollyard.inside")
    run = f"python3 -I /tests/{_CHECK} {_WORKDIR} /tests/plan.json"
    extra = {
        "verifier": "commands",
        "options": {"commands": [run], "score": "all", "timeout_s": _TIMEOUT_S},
        "grade": "sealed",
        "layers": [layer],
        "verifier_layers": [layer],
    }
    write_task(
        folder,
        instruction=_describe(repo, finding),
        table={
            "metadata": {"repo": repo, "fault": name.rpartition(".")[2].partition("__")[0], "rollyard": extra},
            "environment": {"workdir": _WORKDIR},
            "agent": {"timeout_sec": 3000.0},
            "verifier": {"timeout_sec": _TIMEOUT_S + 30.0},
        },
        tests={
            "test.sh": reward_script(run),
            "plan.json": msgspec.json.encode(plan),
            "original.tar.gz": pack_tree(original),
            **{name: inside.joinpath(name).read_bytes() for name in _JUDGES},
        },
        solution={
            "solve.sh": f"#!/bin/sh\ncd {_WORKDIR} && git apply -R /solution/fault.patch\n",
            "fault.patch": patch,
        },
        environment={
            "Dockerfile": "\n".join(
                [
                    f"ARG BASE={options.get('image', 'host')}",
                    "FROM ${BASE}",
                    f"ADD repository.tar.gz {_WORKDIR}/",
                    f"WORKDIR {_WORKDIR}",
                    f"RUN {ONE_COMMIT}",
                    "",
                ]
            ),
            "repository.tar.gz": pack_tree(given),
        },
    )


def _packages(options: Mapping[str, Any]) -> list[str]:
    """pytest, unless one is named, and what else is."""
    named = [package.strip() for package in str(options.get("packages", "")).split(",") if package.strip()]
    return named if any(package.startswith("pytest==") for package in named) else [_PYTEST, *named]


def _describe(repo: str, finding: list[str]) -> str:
    files = "\n".join(f"- `{path}`" for path in finding)
    return (
        f"A change has broken {repo}, whose repository is in {_WORKDIR}. Tests of these files, which are not here, fail:\n\n"
        f"{files}\n\nFind the fault and repair it in the source. All of the repository's tests are run when you are done."
    )


adapter = Adapter(
    about="SWE-smith's branches: a git repository of which each branch is one instance",
    get="a clone of github.com/swesmith/OWNER__NAME.HASH, with all of its branches",
    recognise=recognise,
    read=read,
    needs=("git and python3 in the image",),
    options=("arguments", "image", "instances", "packages"),
    carries=_JUDGES,
)
