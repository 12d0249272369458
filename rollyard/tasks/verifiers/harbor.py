"""Harbor's own protocol: run `/tests/test.sh` from the working directory, then read the reward it wrote.

`reward.json` (a number, or a flat object of numbers) wins over `reward.txt` (one number). The script's exit code says
nothing. No file, an empty one, NaN or text is a verifier that failed: reward None. A script that could not start its test runner
may still write 0; whether that is the agent's doing is found out on the untouched image (`runner.py`).
"""

from __future__ import annotations

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import PathError
from rollyard.core.protocols import Policy, Sandbox, Verifier
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import VerifierSpec
from rollyard.tasks.verifiers.options import read_options
from rollyard.tasks.verifiers.rewards import parse_json, parse_text
from rollyard.tasks.verifiers.run_once import retry_dropped, run_once
from rollyard.tasks.verifiers.runner import RunnerNotStarted, not_started
from rollyard.tasks.verifiers.sandbox import LOGS, TESTS
from rollyard.tasks.verifiers.tests import upload_tests

_MAX_REWARD = 2**20
_MAX_LOG = 64 * 2**20
_LOG_TAIL = 64 * 1024
_MAX_CHECKS = 2000


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


def make(spec: VerifierSpec, policy: Policy | None) -> Verifier:
    read_options(spec, _Options)

    async def harbor(sandbox: Sandbox, rollout: Rollout) -> Verdict:
        await upload_tests(spec, sandbox, rollout)
        script = f"chmod +x {TESTS}/test.sh 2>/dev/null; exec {TESTS}/test.sh > {LOGS}/test-stdout.txt 2>&1"
        done = await run_once(sandbox, script)
        verdict = await retry_dropped(lambda: _reward(sandbox))
        log = (await _file(sandbox, f"{LOGS}/test-stdout.txt", _MAX_LOG))[-_LOG_TAIL:].decode(
            "utf-8", "backslashreplace"
        )
        checks = read_ctrf(await _file(sandbox, f"{LOGS}/ctrf.json", _MAX_REWARD))
        if verdict.reward is None and done.exit_code not in (0, None):
            error = f"{verdict.error} (test.sh exited with {done.exit_code})"
            verdict = msgspec.structs.replace(verdict, error=error)
        verdict = msgspec.structs.replace(verdict, log=log, checks=checks)
        if not verdict.reward and (cause := not_started(log, done.exit_code)) is not None:
            zero = Verdict(reward=0.0, parts={"reward": 0.0}, error=verdict.error, log=log, checks=checks)
            raise RunnerNotStarted(cause, zero if verdict.reward is None else verdict)
        return verdict

    return harbor


async def _reward(sandbox: Sandbox) -> Verdict:
    for name, parse in (("reward.json", parse_json), ("reward.txt", parse_text)):
        path = f"{LOGS}/{name}"
        try:
            found = await sandbox.stat(path)
            if found.kind != "file" or found.size > _MAX_REWARD:
                return Verdict(status="failed", error=f"{path} is a {found.kind} of {found.size} bytes, not a reward")
            return parse(await sandbox.read(path, max_bytes=_MAX_REWARD))
        except PathError as error:
            if error.errno_name != "ENOENT":
                raise
    return Verdict(status="failed", error=f"the tests wrote neither {LOGS}/reward.json nor reward.txt")


async def _file(sandbox: Sandbox, path: str, limit: int) -> bytes:
    """A file the tests left, or nothing."""
    try:
        if (await sandbox.stat(path)).kind != "file":
            return b""
        return await retry_dropped(lambda: sandbox.read(path, max_bytes=limit))
    except PathError:
        return b""


def read_ctrf(text: bytes) -> dict[str, bool]:
    """Named checks out of a CTRF report, where the tests left one. It is evidence beside the reward, never the reward."""
    try:
        report = msgspec.json.decode(text)
        tests = report["results"]["tests"][:_MAX_CHECKS]
        return {str(test["name"]): test["status"] == "passed" for test in tests}
    except (*BAD_JSON, KeyError, TypeError, IndexError):
        return {}
