"""Checking a dataset by a sample: how much of it loads, and whether what was chosen builds and is judged as it should be."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from rollyard.core.protocols import Backend
from rollyard.core.task import Task
from rollyard.runs.rollout.provision import Provision
from rollyard.tasks.taskset import Taskset
from rollyard.testing.tasks import CheckOptions, TaskCheck, check_each

_REASON = 300


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
    tell: Callable[[TaskCheck], None] = lambda check: None,
) -> DatasetCheck:
    """`tell` hears of each task as it is done."""

    def load() -> tuple[Taskset, list[Task]]:
        found = Taskset.load(name, trust_tasks=options.trust_tasks)
        wanted = found.filter(options.filter) if options.filter else found
        return found, list(wanted.shuffle(seed).limit(sample))

    found, chosen = await anyio.to_thread.run_sync(load)
    checks: list[TaskCheck] = []
    async for check in check_each(chosen, backend, options, Provision.of(backend)):
        checks.append(check)
        tell(check)
    return DatasetCheck(
        name=name,
        loaded=len(found),
        skipped=tuple((one.folder, one.reason) for one in found.skipped),
        checks=tuple(sorted(checks, key=lambda check: check.task_id)),
    )


def is_built(check: TaskCheck) -> bool:
    """Whether a sandbox stood on its image: something got a reward, or failed after that."""
    said = [problem for proof in check.proofs for problem in proof.problems]
    return bool(check.proofs) and not any(text.startswith("provision:") for text in said)


def _always(check: TaskCheck, agent: str, reward: Callable[[float], bool]) -> bool:
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
        "nop 0": sum(_always(check, "nop", lambda value: value < 1.0) for check in checks),
        "gold 1": sum(_always(check, "oracle", lambda value: value >= 1.0) for check in checks),
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
    return " ".join(text.split())[:_REASON]
