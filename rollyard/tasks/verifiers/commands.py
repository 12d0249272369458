"""Shell commands as a verifier: each passes when it exits with 0.

`score = "fraction"` (default) gives the weighted share that passed, `"all"` gives 1 or 0. Exit codes are read on the host, so
nothing in the sandbox can write the reward. A command that runs too long has failed; one that was lost leaves no reward, and so
does one whose test runner cannot start on the untouched image either (`runner.py`).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Policy, Sandbox, Verifier
from rollyard.core.rollout import CommandRecord, Rollout, Verdict
from rollyard.core.task import VerifierSpec
from rollyard.tasks.verifiers.options import read_options
from rollyard.tasks.verifiers.runner import RunnerNotStarted, not_started
from rollyard.tasks.verifiers.tests import upload_tests


class CommandCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: str
    name: str | None = None
    weight: float = 1.0
    timeout_s: float | None = None


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    commands: str | list[str | CommandCheck]  # a string is one command
    score: Literal["fraction", "all"] = "fraction"
    timeout_s: float = 300.0  # for each


def make(spec: VerifierSpec, policy: Policy | None) -> Verifier:
    options = read_options(spec, _Options)
    given = [options.commands] if isinstance(options.commands, str) else options.commands
    checks = [CommandCheck(run=item) if isinstance(item, str) else item for item in given]
    if not checks or not all(math.isfinite(c.weight) and c.weight > 0 for c in checks):
        raise ConfigError("verifier 'commands': options.commands: at least one command, each with a positive weight")

    async def commands(sandbox: Sandbox, rollout: Rollout) -> Verdict:
        if spec.tests:
            await upload_tests(spec, sandbox, rollout)
        records = [await _run(sandbox, check, check.timeout_s or options.timeout_s) for check in checks]
        verdict = _verdict(checks, records, options.score)
        if verdict.reward is not None and (cause := _not_started(records)) is not None:
            raise RunnerNotStarted(cause, verdict)
        return verdict

    return commands


def _not_started(records: list[CommandRecord]) -> str | None:
    """The first command whose output says that its runner is missing. An exit code of 127 alone says nothing: the program may
    be what the agent was asked for."""
    failed = [record for record in records if record.exit_code != 0 and not record.timed_out]
    causes = ((record, not_started(f"{record.stdout}\n{record.stderr}", None)) for record in failed)
    return next((f"{record.command!r}: {cause}" for record, cause in causes if cause is not None), None)


async def _run(sandbox: Sandbox, check: CommandCheck, timeout_s: float) -> CommandRecord:
    done = await sandbox.exec(check.run, timeout=timeout_s)
    return CommandRecord.of(check.run, done)


def _verdict(checks: list[CommandCheck], records: list[CommandRecord], score: str) -> Verdict:
    lost = next((r for r in records if r.exit_code is None and not r.timed_out), None)
    log = "".join(f"$ {r.command}\n{r.stdout}{r.stderr}[exit {r.exit_code}]\n" for r in records)
    if lost is not None:
        return Verdict(status="failed", error=f"{lost.command!r} was lost", log=log, commands=tuple(records))
    passed = [record.exit_code == 0 for record in records]
    names = _names(checks)
    share = math.fsum(c.weight for c, ok in zip(checks, passed, strict=True) if ok) / math.fsum(
        c.weight for c in checks
    )
    reward = float(all(passed)) if score == "all" else share
    return Verdict(
        reward=reward,
        parts={"reward": reward, "passed": share},
        checks=dict(zip(names, passed, strict=True)),
        log=log,
        commands=tuple(records),
    )


def _names(checks: list[CommandCheck]) -> list[str]:
    """Each check's name, or its command; a repeated one gets its number."""
    names: list[str] = []
    for number, check in enumerate(checks):
        name = check.name or check.run
        names.append(name if name not in names else f"{name} #{number + 1}")
    return names
