"""Why a rollout ended as it did: the cause in one sentence, the evidence, and what to do about it."""

from __future__ import annotations

import msgspec

from rollyard.core.errors import Boundary
from rollyard.core.printable import printable
from rollyard.core.remedies import remedy_of
from rollyard.core.rollout import CommandRecord, Failure, Rollout, Verdict
from rollyard.store import Store
from rollyard.store.values import RolloutQuery

_LINES = 15  # of a log or of an output that are shown
_NO_ANSWER = "the agent made no model call"


class Clue(msgspec.Struct, frozen=True):
    title: str
    text: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    rollout_id: str
    task_id: str
    agent: str
    policy: str | None
    status: str
    reward: float | None
    cause: str
    evidence: tuple[Clue, ...]
    remedy: str

    def text(self) -> str:
        reward = "no reward" if self.reward is None else f"reward {self.reward:g}"
        who = f"{self.agent} / {self.policy}" if self.policy else self.agent
        lines = [f"{self.task_id}  {who}  {self.status}, {reward}  ({self.rollout_id})", f"cause   {self.cause}"]
        for one in self.evidence:
            lines += [f"--- {one.title}", one.text]
        return printable("\n".join([*lines, f"remedy  {self.remedy}"]))


def explain(rollout: Rollout) -> Explanation:
    cause, remedy = _cause(rollout)
    return Explanation(
        rollout_id=rollout.id,
        task_id=rollout.task.id,
        agent=rollout.agent,
        policy=rollout.labels.get("policy"),
        status=rollout.status,
        reward=rollout.reward,
        cause=cause,
        evidence=tuple(one for one in _evidence(rollout) if one.text.strip()),
        remedy=remedy,
    )


def _cause(rollout: Rollout) -> tuple[str, str]:
    failure, verdict = rollout.failure, rollout.verdict
    if failure is not None:
        return _explain_failure(failure), failure.hint or _remedy(rollout, failure.cause, failure.boundary)
    if rollout.status == "budget":
        more = f"`rollyard continue {rollout.id}` goes on from there; a new run is given more with --max-calls"
        return f"it ran out of its budget: {rollout.stop_reason}", more
    if verdict is None:
        return "it was never judged: the task has no verifier", "docs/verifiers.md says how to give it one"
    if verdict.reward is None:
        return f"the verifier gave no reward: {verdict.error or verdict.status}", _remedy(
            rollout, "VerifierError", "verifier"
        )
    if verdict.reward >= 1:
        return "the verifier passed it" + _because(rollout), "nothing to do"
    return _explain_verdict(rollout, verdict), _advice(rollout)


def _remedy(rollout: Rollout, cause: str, boundary: Boundary) -> str:
    said = remedy_of(cause, boundary)
    return said.format(id=rollout.id, run=rollout.run_id or "RUN", sandbox=rollout.sandbox)


def _explain_failure(failure: Failure) -> str:
    said = " ".join(failure.message.split())
    return f"{failure.cause} in {failure.stage}, at the {failure.boundary}: {said}"


def _explain_verdict(rollout: Rollout, verdict: Verdict) -> str:
    missed = [name for name, passed in verdict.checks.items() if not passed]
    if missed:
        said = f"{len(missed)} of {len(verdict.checks)} checks failed: {', '.join(missed[:5])}"
        return said + (" ..." if len(missed) > 5 else "") + _because(rollout)
    failed = [one for one in verdict.commands if one.exit_code != 0]
    if failed:
        return f"the verifier's command {failed[0].command!r} gave exit code {failed[0].exit_code}" + _because(rollout)
    return f"the verifier gave {verdict.reward:g}{': ' + verdict.error if verdict.error else ''}" + _because(rollout)


def _because(rollout: Rollout) -> str:
    if rollout.stop_reason:
        return f"; the agent was stopped: {rollout.stop_reason}"
    if rollout.exit_code:
        return f"; the agent ended with exit code {rollout.exit_code}"
    if not rollout.calls and rollout.agent not in ("oracle", "nop"):
        return f"; {_NO_ANSWER}"
    if not rollout.diff and rollout.agent != "nop":
        return "; no file was changed"
    return ""


def _advice(rollout: Rollout) -> str:
    if not rollout.calls and rollout.agent not in ("oracle", "nop"):
        return "the agent never asked the model: " + _remedy(rollout, "AgentError", "agent")
    if rollout.stop_reason:
        return "it was cut off: more room (--max-calls, --max-tokens, --agent-s), or a model with a longer context"
    if rollout.agent == "nop":
        return "nothing to do: nop leaves the task as it is, which must fail"
    return (
        f"`rollyard show {rollout.id} --part messages` is the transcript; `rollyard view` shows it beside the verdict"
    )


def _evidence(rollout: Rollout) -> list[Clue]:
    found = [_command("install", one) for one in rollout.install if one.exit_code != 0]
    found += [_command("setup", one) for one in rollout.setup if one.exit_code != 0]
    if rollout.failure is not None and rollout.failure.status is not None:
        found.append(Clue("the model server", f"HTTP status {rollout.failure.status}"))
    found += [Clue("a model call that failed", error) for error in _call_errors(rollout)[-1:]]
    if rollout.verdict is not None and rollout.reward != 1:
        found += [_command("verify", one) for one in rollout.verdict.commands if one.exit_code != 0]
        found.append(Clue("the verifier's log", _tail(rollout.verdict.log)))
    if rollout.failure is not None or rollout.exit_code:
        found.append(Clue("the end of what the agent printed", _tail(rollout.log_tail)))
    if (rollout.failure is None or rollout.failure.grade) and (last := _last_words(rollout)):
        found.append(Clue("the model's last words", last))
    return found


def _command(stage: str, record: CommandRecord) -> Clue:
    ending = "ran past its limit" if record.timed_out else f"exit code {record.exit_code}"
    return Clue(f"{stage}: {record.command} ({ending})", _tail(f"{record.stdout}\n{record.stderr}"))


def _call_errors(rollout: Rollout) -> list[str]:
    if rollout.trajectory is None:
        return []
    return [f"call {one.seq}: {one.error}" for one in rollout.trajectory.records if one.error]


def _last_words(rollout: Rollout) -> str:
    if rollout.trajectory is None:
        return ""
    for record in reversed(rollout.trajectory.records):
        answer = rollout.trajectory.answer(record.id)
        if answer is not None and answer.message.text:
            return _tail(answer.message.text)
    return ""


def _tail(text: str) -> str:
    return "\n".join([line.rstrip()[:300] for line in text.splitlines() if line.strip()][-_LINES:])


class Explanations(msgspec.Struct, frozen=True):
    """Of a rollout, or of the rollouts of a run that ended without the reward 1."""

    found: tuple[Explanation, ...]
    run_id: str | None = None  # where a run was asked about
    ended: int = 1
    owed: int = 0  # attempts of the run that have not ended

    def text(self) -> str:
        if self.found:
            return "\n\n".join(one.text() for one in self.found)
        if not self.ended and not self.owed:
            return f"run {self.run_id} has no attempts"
        if not self.owed:
            return "every rollout of the run has the reward 1"
        ended = f"{self.ended} of {self.ended + self.owed} attempts have ended, each with the reward 1"
        return f"{ended if self.ended else 'no rollout of the run has ended'}; still owed: {self.owed}"


async def explain_by_id(where: str, text: str, limit: int) -> Explanations:
    async with Store.open(where, create=False) as store:
        kind, found = await store.resolve(text)
        if kind == "rollout":
            return Explanations((explain(await store.get_rollout(found)),))
        counts = await store.progress(found)
        ended = counts.get("done", 0) + counts.get("failed", 0)
        explained = await _explain_run(store, found, limit)
        return Explanations(explained, found, ended, sum(counts.values()) - ended)


async def _explain_run(store: Store, run_id: str, limit: int) -> tuple[Explanation, ...]:
    explained: list[Explanation] = []
    offset: int | None = 0
    while offset is not None and len(explained) < limit:
        page = await store.list_rollouts(RolloutQuery(run_id=run_id, limit=100, offset=offset))
        below = [row for row in page.rows if row.reward is None or row.reward < 1]
        for row in below[: limit - len(explained)]:
            explained.append(explain(await store.get_rollout(row.id)))
        offset = page.next
    return tuple(explained)
