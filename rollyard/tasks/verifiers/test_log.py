"""The log of a project's own tests as a verifier, read by the rules of its set (`inside/log_check.py`).

`plan.json` among the task's tests says how they are run, `tests.json` which of them must pass. Nothing is judged in the sandbox,
where the code under test could change the judge: the log and the record of the run are fetched, and read by a program on the
host, which runs nothing of theirs and has bounds of its own.
"""

from __future__ import annotations

import importlib.resources
import resource
import subprocess
import sys
from pathlib import Path

import anyio.to_thread
import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import VerifierError
from rollyard.core.protocols import Policy, Sandbox, Verifier
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.scratch import scratch
from rollyard.core.task import VerifierSpec
from rollyard.tasks.verifiers.options import read_options
from rollyard.tasks.verifiers.runner import RunnerNotStarted, not_started
from rollyard.tasks.verifiers.test_record import TestPlan, TestRecord, read_log, run_recorded
from rollyard.tasks.verifiers.tests import upload_tests

_CPU_S = 120
_MEMORY = 4 * 2**30
_LOG_TAIL = 20_000


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    timeout_s: float = 1800.0


class _PlanFile(TestPlan, frozen=True, kw_only=True):
    """With the environment of a runner that runs without a host."""

    key: str = ""
    log: str = ""
    record: str = ""


def make(spec: VerifierSpec, policy: Policy | None) -> Verifier:
    options = read_options(spec, _Options)

    async def test_log(sandbox: Sandbox, rollout: Rollout) -> Verdict:
        plan, tests = await anyio.to_thread.run_sync(_read_tests, spec)
        await upload_tests(spec, sandbox, rollout)
        done, record = await run_recorded(sandbox, plan, python=["python3", "-I", "-S"], timeout_s=options.timeout_s)
        if done.timed_out:
            return _fail(done.text, f"the tests took longer than {options.timeout_s:g} s")
        if done.exit_code is None:
            return Verdict(status="failed", error="the tests were lost", log=done.text)
        log = await read_log(sandbox, record) if record is not None else None
        text = done.text + (log or b"").decode("utf-8", "replace")[-_LOG_TAIL:]
        if record is None or (log is None and record.prepared):
            verdict = _fail(text, "the tests left no record and log that agree")
        else:
            verdict = await anyio.to_thread.run_sync(_judge, log or b"", record, tests, text)
        if verdict.reward == 0.0 and (cause := not_started(text, None) or _explain_unseen(plan, record)) is not None:
            raise RunnerNotStarted(cause, verdict)
        return verdict

    return test_log


def _explain_unseen(plan: TestPlan, record: TestRecord | None) -> str | None:
    """No verdict comes from tests that nothing could see; where they are seen on the untouched image, the answer is the
    reason."""
    if record is None:
        return "nothing recorded the tests"
    return "pytest did not load the judge's plugin" if plan.site and record.prepared and not record.starts else None


def _fail(log: str, error: str) -> Verdict:
    return Verdict(reward=0.0, parts={"reward": 0.0}, log=log, error=error)


def _read_tests(spec: VerifierSpec) -> tuple[TestPlan, bytes]:
    """The plan, and the list of tests as it is."""
    files = {path.name: path for folder in spec.tests for path in Path(folder).glob("*.json")}
    try:
        given = msgspec.json.decode(files["plan.json"].read_bytes(), type=_PlanFile)
        tests = files["tests.json"].read_bytes()
    except (*BAD_JSON, OSError, KeyError) as error:
        raise VerifierError(f"the task's tests have no plan.json and tests.json that can be read: {error}") from error
    fields = {name: getattr(given, name) for name in TestPlan.__struct_fields__}
    return TestPlan(**fields), tests


def _judge(log: bytes, record: TestRecord, tests: bytes, shown: str) -> Verdict:
    program = importlib.resources.files("rollyard.inside").joinpath("log_check.py").read_text()
    with scratch("log") as place:
        for name, data in {"log": log, "tests": tests, "record": b"\n" + msgspec.json.encode(record)}.items():
            (place / name).write_bytes(data)
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            program,
            *(str(place / name) for name in ("log", "tests", "record")),
        ]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, preexec_fn=_limit_cpu
        )
    if done.returncode not in (0, 1):
        return _fail(f"{shown}{done.stdout}{done.stderr}", "the log could not be read in the time and memory there are")
    reward = float(done.returncode == 0)
    said = f"{done.stdout}{done.stderr}"
    doubt = said.partition("not believed: ")[2].strip() or None
    return Verdict(reward=reward, parts={"reward": reward}, log=f"{shown}{said}", error=doubt)


def _limit_cpu() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
