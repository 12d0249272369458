"""pytest as a verifier, started so that nothing in the working directory configures it.

Isolated mode, no configuration file, root and conftest search cut at `/tests`. Tests that import the agent's code run that code
inside pytest; `pythonpath` says where it is found. So no file that pytest writes is believed: another process hears of each test
while it ends, of the end, and of controls that cannot pass, and signs what it heard (`test_record.py`).
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Policy, Sandbox, Verifier
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import VerifierSpec
from rollyard.tasks.verifiers.options import read_options
from rollyard.tasks.verifiers.runner import RunnerNotStarted
from rollyard.tasks.verifiers.sandbox import TESTS
from rollyard.tasks.verifiers.test_record import WITNESS, TestPlan, TestRecord, run_recorded
from rollyard.tasks.verifiers.tests import upload_tests

_LOG_TAIL = 64 * 1024


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    paths: tuple[str, ...] = (".",)  # below /tests
    pythonpath: list[str] = []  # where the code under test lies; relative to the working directory
    args: list[str] = []
    python: str = "python3"
    score: Literal["all", "fraction"] = "all"
    timeout_s: float = 300.0


def make(spec: VerifierSpec, policy: Policy | None) -> Verifier:
    options = read_options(spec, _Options)
    if any(path.startswith("/") or ".." in path.split("/") for path in options.paths):
        raise ConfigError("verifier 'pytest': options.paths: paths are below /tests")

    async def pytest(sandbox: Sandbox, rollout: Rollout) -> Verdict:
        await upload_tests(spec, sandbox, rollout)
        done, record = await run_recorded(
            sandbox,
            TestPlan(command=_command(options), witness=WITNESS, echo=True),
            python=[options.python, "-I"],
            timeout_s=options.timeout_s,
        )
        log = done.text[-_LOG_TAIL:]
        if done.timed_out:
            return Verdict(
                reward=0.0, parts={"reward": 0.0}, log=log, error=f"pytest took longer than {options.timeout_s:g} s"
            )
        if done.exit_code is None:
            return Verdict(status="failed", error="pytest was lost", log=log)
        if re.search(r"No module named '?pytest'?\s*$", log) and done.exit_code == 1:
            raise RunnerNotStarted(f"{options.python} has no pytest", _no_tests(log))
        return judge_record(record, done.exit_code, options.score, log)

    return pytest


def _command(options: _Options) -> list[str]:
    where = ["-o", "pythonpath=" + " ".join(options.pythonpath)] if options.pythonpath else []
    return [
        options.python,
        "-I",
        WITNESS,
        "-q",
        "-c",
        "/dev/null",
        f"--rootdir={TESTS}",
        f"--confcutdir={TESTS}",
        "-p",
        "no:cacheprovider",
        *where,
        *options.args,
        *(f"{TESTS}/{path}" if path != "." else TESTS for path in options.paths),
    ]


def judge_record(record: TestRecord | None, exit_code: int, score: str, log: str) -> Verdict:
    checks = read_checks(record) if record is not None else {}
    if not checks and exit_code not in (0, 1):
        raise RunnerNotStarted(f"pytest exited with {exit_code} and ran no test", _no_tests(log))
    if record is None or not record.starts:
        raise RunnerNotStarted("nothing recorded the tests", _no_tests(log))
    doubt = record.doubt
    share = sum(checks.values()) / len(checks) if checks and doubt is None else 0.0
    if exit_code == 0 and share < 1.0:
        share = 0.0  # the exit code and the record disagree: something ended pytest early
    reward = share if score == "fraction" else float(exit_code == 0 and share == 1.0)
    return Verdict(reward=reward, parts={"reward": reward, "passed": share}, checks=checks, log=log, error=doubt)


def _no_tests(log: str) -> Verdict:
    return Verdict(reward=0.0, parts={"reward": 0.0, "passed": 0.0}, log=log, error="no test ran")


def read_checks(record: TestRecord) -> dict[str, bool]:
    """Each test, by the name that a JUnit report gives it; skipped ones do not count."""
    found: dict[str, bool] = {}
    for test in record.tests:
        name = _junit_name(test.id)
        if test.outcome == "failed":
            found[name] = False
        elif test.when == "call" and test.outcome == "passed":
            found.setdefault(name, True)
    return found


def _junit_name(node: str) -> str:
    path, bracket, parameters = node.partition("[")
    module, *names = path.split("::")
    module = module.removesuffix(".py").replace("/", ".")
    if not names:
        return f"::{module}"
    return f"{'.'.join([module, *names[:-1]])}::{names[-1]}{bracket}{parameters}"
