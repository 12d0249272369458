"""Checking a dataset by a sample: how much of it loads, and whether what was chosen builds and is judged as it should be."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Backend
from rollyard.core.task import Task
from rollyard.runs.rollout.provision import Provision
from rollyard.tasks.taskset import Taskset
from rollyard.testing.tasks import CheckOptions, TaskCheck, check_each

_REASON = 300
_RULES = re.compile(r"[=_-]{5,}")  # lines that logs are divided by


class DatasetCheck(msgspec.Struct, frozen=True, kw_only=True):
    """`skipped` are tasks that could not be read, with the reason; `checks` those of the sample."""

    name: str
    loaded: int
    skipped: tuple[tuple[str, str], ...]
    checks: tuple[TaskCheck, ...]


async def check_dataset(
    name: str,
    backend: Backend,
    options: CheckOptions,
    *,
    sample: int,
    seed: int = 0,
    results: Path | None = None,
    tell: Callable[[TaskCheck], None] = lambda check: None,
) -> DatasetCheck:
    """`tell` hears of each task as it is done. `results` is a file that each outcome is added to; what it has already of
    these tasks and options is not done again."""

    def load() -> tuple[Taskset, list[Task]]:
        found = Taskset.load(name, trust_tasks=options.trust_tasks)
        wanted = found.filter(options.filter) if options.filter else found
        if options.filter and not wanted:
            raise ConfigError(
                f"no task of {name} matches {options.filter!r}", hint=f"one of {len(found)}: {found[0].id}"
            )
        return found, list(wanted.shuffle(seed).limit(sample))

    found, chosen = await anyio.to_thread.run_sync(load)
    conditions = _conditions(backend, options)
    if options.logs is not None:
        await anyio.to_thread.run_sync(_make_folder, options.logs)
    known = await anyio.to_thread.run_sync(_read_results, results, conditions) if results is not None else {}
    checks = [known[task.id, task.digest] for task in chosen if (task.id, task.digest) in known]
    left = [task for task in chosen if (task.id, task.digest) not in known]
    async with aclosing(check_each(left, backend, options, Provision.of(backend))) as outcomes:
        async for check in outcomes:
            if results is not None:
                await anyio.to_thread.run_sync(_add_result, results, _Result(conditions, check))
            checks.append(check)
            tell(check)
    return DatasetCheck(
        name=name,
        loaded=len(found),
        skipped=tuple((one.folder, one.reason) for one in found.skipped),
        checks=tuple(sorted(checks, key=lambda check: check.task_id)),
    )


class _Result(msgspec.Struct, frozen=True):
    """A line of a results file."""

    conditions: dict[str, Any]
    check: TaskCheck


def _conditions(backend: Backend, options: CheckOptions) -> dict[str, Any]:
    """What an outcome depends on beside its task."""
    names = ("repeats", "network", "build_network", "trust_tasks", "allow_unsafe", "trivial")
    return {"sandbox": backend.name, **{name: getattr(options, name) for name in names}}


def _read_results(file: Path, conditions: dict[str, Any]) -> dict[tuple[str, str], TaskCheck]:
    """By the tasks' ids and digests: two may be alike but for their names. A line that was cut off while it was written is left
    out, and its task done again."""
    found: list[_Result] = []
    try:
        with file.open("ab+") as stream:  # whether it takes outcomes is known before the first is made
            stream.seek(0)
            lines = stream.readlines()
    except OSError as error:
        raise _refuse_path(file, error) from error
    for number, line in enumerate(lines, start=1):
        try:
            found.append(msgspec.json.decode(line, type=_Result))
        except BAD_JSON as error:
            if number < len(lines) or line.endswith(b"\n"):
                hint = "name a file that `check dataset --results` wrote, or a new one"
                raise ConfigError(f"{file}:{number}: no outcome of a check: {error}", hint=hint) from error
            os.truncate(file, sum(map(len, lines[:-1])))
    return {(one.check.task_id, one.check.digest): one.check for one in found if one.conditions == conditions}


def _add_result(file: Path, result: _Result) -> None:
    try:
        with file.open("ab") as stream:
            stream.write(msgspec.json.encode(result) + b"\n")
    except OSError as error:
        raise _refuse_path(file, error) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refuse_path(folder, error) from error


def _refuse_path(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {error.strerror or error}", hint="name another place")


def is_built(check: TaskCheck) -> bool:
    """Whether a sandbox stood on its image: something got a reward, or failed after that."""
    said = [problem for proof in check.proofs for problem in proof.problems]
    return bool(check.proofs) and not any(text.startswith("provision:") for text in said)


def _always_holds(check: TaskCheck, agent: str, reward: Callable[[float], bool]) -> bool:
    rewards = [value for proof in check.proofs if proof.agent == agent for value in proof.rewards]
    return bool(rewards) and all(value is not None and reward(value) for value in rewards)


def summarise(found: DatasetCheck) -> dict[str, Any]:
    """The row of a dataset in a table of datasets."""
    checks = found.checks
    seconds = [second for check in checks for proof in check.proofs for second in proof.seconds]
    return {
        "found": found.loaded + len(found.skipped),
        "loaded": found.loaded,
        "sampled": len(checks),
        "built": sum(map(is_built, checks)),
        "nop 0": sum(_always_holds(check, "nop", lambda value: value < 1.0) for check in checks),
        "gold 1": sum(_always_holds(check, "oracle", lambda value: value >= 1.0) for check in checks),
        "flaky": sum(check.flaky for check in checks),
        "trivial": sum(any(f.where == "trivial" for f in check.findings) for check in checks),
        "seconds": round(statistics.median(seconds), 2) if seconds else None,
        "MB": round(sum(check.bytes for check in checks) / 2**20, 2),
    }


def dataset_table(found: DatasetCheck) -> list[dict[str, str]]:
    """One row per task of the sample, and one for those that cannot be read."""
    rows = [_row(check) for check in found.checks]
    if found.skipped:
        folder, reason = found.skipped[0]
        text = f"{len(found.skipped)} cannot be read; the first, {folder}: {reason}"
        rows.append(
            {"task": "-", "result": "left out", "nop": "-", "oracle": "-", "seconds": "-", "reason": _line(text)}
        )
    return rows or [{"task": "-", "result": "no tasks", "nop": "-", "oracle": "-", "seconds": "-", "reason": ""}]


def _row(check: TaskCheck) -> dict[str, str]:
    by_agent = {proof.agent: proof for proof in check.proofs}
    errors = [f"{finding.where}: {finding.message}" for finding in check.findings if finding.level == "error"]
    return {
        "task": check.task_id,
        "result": "flaky" if check.flaky else "ok" if check.ok else "failed",
        "nop": _rewards(by_agent["nop"].rewards) if "nop" in by_agent else "-",
        "oracle": _rewards(by_agent["oracle"].rewards) if "oracle" in by_agent else "-",
        "seconds": f"{max((max(proof.seconds) for proof in check.proofs), default=0.0):.1f}",
        "reason": _line("; ".join(errors)),
    }


def _rewards(rewards: Sequence[float | None]) -> str:
    return "/".join(sorted({"none" if reward is None else f"{reward:g}" for reward in rewards}))


def _line(text: str) -> str:
    """In one line; of a long text the beginning, which says what failed, and the end, where logs say why."""
    whole = " ".join(_RULES.sub(" ", text).split())
    return whole if len(whole) <= _REASON else f"{whole[: _REASON // 3]} ... {whole[-_REASON * 2 // 3 :]}"
