"""pytest as a verifier, started so that nothing in the working directory configures it.

Isolated mode, no configuration file, root and conftest search cut at `/tests`; the result is the report and
the exit code together: a program under test that ends the interpreter early leaves no report, and no report is no pass. Tests
that import the agent's code run that code inside pytest; `pythonpath` says where it is found.
"""

from __future__ import annotations

import re
from typing import Literal
from xml.etree import ElementTree as Xml

import msgspec

from rollyard.core.errors import ConfigError, PathError
from rollyard.core.protocols import Policy, Sandbox, Verifier
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import VerifierSpec
from rollyard.tasks.verifiers.durable import again
from rollyard.tasks.verifiers.options import read_options
from rollyard.tasks.verifiers.runner import RunnerNotStarted
from rollyard.tasks.verifiers.sandbox import LOGS, TESTS
from rollyard.tasks.verifiers.tests import upload_tests

_REPORT = f"{LOGS}/junit.xml"
_MAX_REPORT = 8 * 2**20
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
        command = _command(options)
        done = await sandbox.exec(command, timeout=options.timeout_s)
        log = done.text[-_LOG_TAIL:]
        if done.timed_out:
            return Verdict(
                reward=0.0, parts={"reward": 0.0}, log=log, error=f"pytest took longer than {options.timeout_s:g} s"
            )
        if done.exit_code is None:
            return Verdict(status="failed", error="pytest was lost", log=log)
        if re.search(r"No module named '?pytest'?\s*$", log) and done.exit_code == 1:
            raise RunnerNotStarted(f"{options.python} has no pytest", _no_tests(log))
        return _verdict(await again(lambda: _report(sandbox)), done.exit_code, options.score, log)

    return pytest


def _command(options: _Options) -> list[str]:
    where = ["-o", "pythonpath=" + " ".join(options.pythonpath)] if options.pythonpath else []
    return [
        options.python,
        "-I",
        "-m",
        "pytest",
        "-q",
        "-c",
        "/dev/null",
        f"--rootdir={TESTS}",
        f"--confcutdir={TESTS}",
        "-p",
        "no:cacheprovider",
        f"--junitxml={_REPORT}",
        *where,
        *options.args,
        *(f"{TESTS}/{path}" if path != "." else TESTS for path in options.paths),
    ]


async def _report(sandbox: Sandbox) -> bytes | None:
    try:
        return await sandbox.read(_REPORT, max_bytes=_MAX_REPORT)
    except PathError as error:
        if error.errno_name == "ENOENT":
            return None
        raise


def _verdict(report: bytes | None, exit_code: int, score: str, log: str) -> Verdict:
    checks = _checks(report) if report is not None else {}
    if not checks and exit_code not in (0, 1):
        raise RunnerNotStarted(f"pytest exited with {exit_code} and ran no test", _no_tests(log))
    share = sum(checks.values()) / len(checks) if checks else 0.0
    if exit_code == 0 and share < 1.0:
        share = 0.0  # the exit code and the report disagree: something ended pytest early
    reward = share if score == "fraction" else float(exit_code == 0 and share == 1.0)
    return Verdict(reward=reward, parts={"reward": reward, "passed": share}, checks=checks, log=log)


def _no_tests(log: str) -> Verdict:
    return Verdict(reward=0.0, parts={"reward": 0.0, "passed": 0.0}, log=log, error="no test ran")


def _checks(report: bytes) -> dict[str, bool]:
    """Each test of a JUnit report; skipped ones do not count. The file comes out of a sandbox: no entities are read."""
    if b"<!DOCTYPE" in report or b"<!ENTITY" in report or b"\0" in report:  # or in wider characters, where they hide
        return {}
    try:
        root = Xml.fromstring(report)  # noqa: S314 - no document type is let through above
    except (Xml.ParseError, LookupError, ValueError):  # an encoding that nobody knows, or one that is not read here
        return {}
    found: dict[str, bool] = {}
    for case in root.iter("testcase"):
        outcome = {child.tag for child in case}
        if "skipped" not in outcome:
            found[f"{case.get('classname')}::{case.get('name')}"] = not outcome & {"failure", "error"}
    return found
