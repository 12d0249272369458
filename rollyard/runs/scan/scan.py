"""All scanners over a rollout or a run, and what the scores are without those that cannot be trusted."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

import msgspec

from rollyard.core import registry
from rollyard.core.rollout import Rollout
from rollyard.runs.report.report import INVALID
from rollyard.runs.rollout.open_policy import open_policy
from rollyard.runs.scan.agent_actions import AgentActions, Finding
from rollyard.runs.scan.model_judge import JUDGE, Unjudged, judge_actions
from rollyard.store import Store
from rollyard.store.listing import run_id
from rollyard.store.values import RolloutQuery

Scanner = Callable[[AgentActions], Iterable[Finding]]
GROUP = "rollyard.scanners"
AUTHOR = "rollyard scan"
JUDGED = "rollyard scan --judge"  # what a model found stands until one is asked again
_LONGEST_LABEL = 2000
MOST_KEPT = 10_000  # findings of one scan, so that a large run's do not fill the memory
_COLUMNS = 80


class ScanReport(msgspec.Struct, frozen=True, kw_only=True):
    """`mean` is over all scored rollouts, `mean_valid` over those whose reward nothing takes the ground from: no finding, and no
    label `invalid` of another author, which `labelled` counts. Of more than `MOST_KEPT` findings the first are kept, and
    `found` counts all."""

    run_id: str
    rollouts: int
    scored: int
    invalid: int
    labelled: int
    found: int
    mean: float | None
    mean_valid: float | None
    findings: tuple[Finding, ...]
    about: Mapping[
        str, str
    ] = {}  # of each rollout with a finding: its task, its agent, its reward and whether that is valid
    unjudged: Mapping[str, str] = {}  # rollouts that a model was asked about and gave no usable answer: why

    def text(self) -> str:
        by_label = f" ({self.labelled} by a label)" if self.labelled else ""
        lines = [f"{self.run_id}: {self.rollouts} rollouts, {self.scored} scored, {self.invalid} invalid{by_label}"]
        lines.append(f"mean reward {_number(self.mean)}, without the invalid {_number(self.mean_valid)}")
        counts = Counter(one.scanner for one in self.findings)
        if counts:
            lines += _wrap("found by " + ", ".join(f"{name} {count}" for name, count in counts.most_common()), "")
        shown = ""
        for one in self.findings:
            if one.rollout_id != shown:
                shown = one.rollout_id
                lines += ["", *_wrap(f"{shown}  {self.about.get(shown, '')}".rstrip(), "")]
            at = one.where if one.call is None else f"{one.where}, call {one.call}"
            lines += [
                *_wrap(f"{one.scanner} ({one.invalidates}): {one.message}", "  "),
                *_wrap(f"{at}: {_short(one.excerpt)}", "    "),
            ]
        if self.findings:
            lines.append("")
        if self.found > len(self.findings):
            lines.append(f"and {self.found - len(self.findings)} more: name a scanner (--scanner) to see them")
        if self.unjudged:
            name, why = next(iter(self.unjudged.items()))
            lines += _wrap(f"not judged by the model: {len(self.unjudged)} rollouts; {name}: {why}", "")
        return "\n".join(lines).rstrip()


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=indent, subsequent_indent=indent + "  ")


def load_scanners(names: Iterable[str] = ()) -> dict[str, Scanner]:
    """All that are installed, or those that are named."""
    return {name: registry.load(GROUP, name) for name in list(names) or registry.names(GROUP)}


def scan_rollout(rollout: Rollout, scanners: Mapping[str, Scanner]) -> tuple[Finding, ...]:
    actions = AgentActions.of(rollout)
    return tuple(finding for scanner in scanners.values() for finding in scanner(actions))


def is_invalid(reward: float | None, findings: Iterable[Finding]) -> bool:
    """Whether a finding takes the ground from this reward."""
    if reward is None:
        return False
    against = "success" if reward > 0 else "failure"
    return any(finding.invalidates in (against, "both") for finding in findings)


def refuse_invalid(
    scanners: Mapping[str, Scanner], labelled: Mapping[str, str] | None = None
) -> Callable[[Rollout], str | None]:
    """For exports: why a rollout's reward cannot be trusted, or None. `labelled` are rollouts with such a label."""

    def refuse(rollout: Rollout) -> str | None:
        if labelled is not None and rollout.id in labelled:
            return labelled[rollout.id]
        found = scan_rollout(rollout, scanners)
        if not is_invalid(rollout.reward, found):
            return None
        return _reasons(found)

    return refuse


async def find_refuse(store: Store, run: str) -> Callable[[Rollout], str | None]:
    """What an export of a run refuses: rewards that a scanner, a model or a person finds invalid."""
    return refuse_invalid(load_scanners(), await labelled_invalid(store, run))


async def labelled_invalid(store: Store, run: str, *, but: Collection[str] = ()) -> dict[str, str]:
    """Rollouts of a run with the label `invalid`, and who says why; not counting the labels of some authors."""
    notes = await store.notes(sorted(await store.find_labelled(run, INVALID)))
    said = {
        name: [
            f"{note.author}: {note.text or INVALID}"
            for note in found
            if (note.kind, note.name) == ("label", INVALID) and note.author not in but
        ]
        for name, found in notes.items()
    }
    return {name: "; ".join(reasons) for name, reasons in said.items() if reasons}


async def scan_run(
    where: str, run: str, names: Iterable[str] = (), judge: str | None = None, model: str | None = None
) -> ScanReport:
    """With a `judge`, a policy's text, a model looks over each rollout too. A scan by all scanners labels what it finds invalid,
    for reports, exports and the page, and so does a model; labels of others stay, and count."""
    names = tuple(names)
    scanners = load_scanners(names)
    async with Store.open(where, create=False) as store, AsyncExitStack() as stack:
        policy = await open_policy(judge, store=store, model=model) if judge is not None else None
        if policy is not None:
            stack.push_async_callback(policy.aclose)
        found_run = await run_id(store, run)
        labelled = await labelled_invalid(store, found_run, but=(AUTHOR,))
        by_people = await labelled_invalid(store, found_run, but=(AUTHOR, JUDGED))
        count, by_label, found_count = 0, 0, 0
        rewards, valid = _Mean(), _Mean()
        findings: list[Finding] = []
        about: dict[str, str] = {}
        unjudged: dict[str, str] = {}
        async for rollout in _rollouts(store, found_run):
            count += 1
            found = scan_rollout(rollout, scanners)
            if not names:
                await _label(store, rollout, found, AUTHOR)
            if policy is not None:
                try:
                    judgement = await judge_actions(AgentActions.of(rollout), policy, model=model or JUDGE)
                except Unjudged as error:  # an earlier label of a model stands
                    unjudged[rollout.id] = error.message
                else:
                    await _label(store, rollout, judgement, JUDGED)
                    found = (*found, *judgement)
            found_count += len(found)
            kept = found[: MOST_KEPT - len(findings)]
            findings += kept
            if kept:
                about[rollout.id] = _describe(rollout, found)
            if rollout.reward is not None:
                rewards.add(rollout.reward)
                if is_invalid(rollout.reward, found):
                    continue
                judged_now = policy is not None and rollout.id not in unjudged
                doubted = rollout.id in (by_people if judged_now else labelled)
                by_label += doubted
                if not doubted:
                    valid.add(rollout.reward)
    return ScanReport(
        run_id=found_run,
        rollouts=count,
        scored=rewards.count,
        invalid=rewards.count - valid.count,
        labelled=by_label,
        found=found_count,
        mean=rewards.value,
        mean_valid=valid.value,
        findings=tuple(findings),
        about=about,
        unjudged=unjudged,
    )


async def _label(store: Store, rollout: Rollout, findings: Sequence[Finding], author: str) -> None:
    """The label says why; one of an earlier scan that found more is taken back."""
    said = _reasons(findings)
    if is_invalid(rollout.reward, findings):
        await store.add_note(rollout.id, "label", author=author, name=INVALID, text=said[:_LONGEST_LABEL])
        return
    for note in (await store.notes([rollout.id])).get(rollout.id, ()):
        if (note.author, note.kind, note.name) == (author, "label", INVALID):
            await store.remove_note(rollout.id, note.id)


def _reasons(findings: Iterable[Finding]) -> str:
    at = {finding: "" if finding.call is None else f" (call {finding.call})" for finding in findings}
    return "; ".join(f"{finding.scanner}: {finding.message}{place}" for finding, place in at.items())


async def _rollouts(store: Store, run: str) -> AsyncIterator[Rollout]:
    offset: int | None = 0
    while offset is not None:
        page = await store.list_rollouts(RolloutQuery(run_id=run, limit=100, offset=offset))
        for row in page.rows:
            yield await store.get_rollout(row.id)
        offset = page.next


class _Mean:
    def __init__(self) -> None:
        self.count, self._sum = 0, 0.0

    def add(self, value: float) -> None:
        self.count, self._sum = self.count + 1, self._sum + value

    @property
    def value(self) -> float | None:
        return self._sum / self.count if self.count else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _describe(rollout: Rollout, findings: Sequence[Finding]) -> str:
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    invalid = ", invalid" if is_invalid(rollout.reward, findings) else ""
    return ", ".join(filter(None, [rollout.task.id, rollout.agent, reward])) + invalid


def _short(text: str) -> str:
    return " ".join(text.split())[:160]
