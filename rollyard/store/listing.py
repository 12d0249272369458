"""What the command line shows of a store: opened, read, closed in one call each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from rollyard.core.call import REPLAYED
from rollyard.core.errors import StoreError
from rollyard.core.failure_groups import FailureGroup
from rollyard.core.message import Message
from rollyard.core.printable import printable
from rollyard.core.rollout import Rollout
from rollyard.store.check import RunCheck
from rollyard.store.check import check_run as check_rows
from rollyard.store.store import Store
from rollyard.store.values import Page, RolloutQuery, RunInfo, StoredEvent, line_name

_CUT = 400  # characters of a message in the short view
_WORD = re.compile(r"[\w./:@-]+")  # what is plain without quotes


async def runs(where: str, limit: int, offset: int) -> list[RunInfo]:
    async with Store.open(where, create=False) as store:
        return await store.list_runs(limit=limit, offset=offset)


async def page(where: str, run: str, options: Mapping[str, Any]) -> Page:
    """Rollouts of a run, or without one of every run."""
    async with Store.open(where, create=False) as store:
        chosen = await run_id(store, run) if run else None
        return await store.list_rollouts(RolloutQuery(run_id=chosen, **options))


async def check_run(where: str, run: str) -> RunCheck:
    async with Store.open(where, create=False) as store:
        return await check_rows(store, await run_id(store, run))


async def run_id(store: Store, text: str) -> str:
    kind, found = await store.resolve(text)
    if kind != "run":
        raise StoreError(f"{found} is a rollout", hint="name a run")
    return found


async def show(where: str, text: str) -> ShownRun | ShownRollout:
    async with Store.open(where, create=False) as store:
        kind, found = await store.resolve(text)
        if kind == "run":
            return ShownRun(
                await store.get_run(found),
                await store.list_rollouts(RolloutQuery(run_id=found, limit=1000)),
                await store.failures(found),
                await store.stopped_policies(found),
            )
        rollout = await store.get_rollout(found)
        events = await store.events(rollout_id=found, limit=100_000)
        return ShownRollout(rollout, events, await find_branches(store, rollout))


class Branches(msgspec.Struct, frozen=True):
    """What branches off a rollout: runs that were made to, and the children that it has in its own run's tree."""

    runs: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


async def find_branches(store: Store, rollout: Rollout) -> Branches:
    made = await store.list_runs(search=f'"branch":"{rollout.id}@', limit=1000)
    children: list[str] = []
    if (await config_of(store, rollout)).get("tree") is not None:
        children = [one.id async for one in store.rollouts(rollout.run_id) if one.parent_rollout == rollout.id]
    return Branches(tuple(run.id for run in made), tuple(children))


async def config_of(store: Store, rollout: Rollout) -> Mapping[str, Any]:
    """The config of the run that a rollout belongs to; empty for one that belongs to none, or whose run is not kept here."""
    found = [] if rollout.run_id is None else await store.list_runs(search=rollout.run_id)
    return next((run.config for run in found if run.id == rollout.run_id), {})


class ShownRun:
    def __init__(self, info: RunInfo, page: Page, failures: Sequence[FailureGroup], stopped: Mapping[str, str]) -> None:
        self._info, self._page, self._failures, self._stopped = info, page, failures, stopped

    def document(self, part: str) -> Any:
        return {
            "run": self._info,
            "failures": self._failures,
            "stopped": self._stopped,
            "rollouts": self._page.rows,
        }

    def text(self, part: str) -> str:
        info = self._info
        states = ", ".join(f"{count} {state}" for state, count in sorted(info.attempts.items()))
        mean = "-" if info.mean_reward is None else f"{info.mean_reward:.3g}"
        lines = [f"run {info.id}"]
        facts = [("state", states), ("rollouts", f"{info.rollouts}, {info.scored} scored, mean reward {mean}")]
        facts += [(name, _plain(value)) for name, value in info.config.items() if value not in (None, {}, [], "")]
        for failure in self._failures:
            facts.append(("failed", f"{failure.count} at {failure.boundary}: {failure.cause}: {failure.message}"))
        facts += [("stopped", f"{policy or 'the policy'}: {said}") for policy, said in self._stopped.items()]
        lines += _align_columns(facts)
        lines += _align_columns(
            [
                (f"  {r.id}", r.task_id, f"#{r.attempt}", line_name(r), r.status, _number(r.reward))
                for r in self._page.rows
            ]
        )
        return printable("\n".join(lines))


class ShownRollout:
    """A rollout for reading: everything as JSON, or as text by parts."""

    def __init__(self, rollout: Rollout, events: list[StoredEvent], branches: Branches = Branches()) -> None:  # noqa: B008 - frozen
        self._rollout, self._events, self._branches = rollout, events, branches

    def document(self, part: str) -> Any:
        rollout = self._rollout
        parts: dict[str, Any] = {
            "calls": [_call(record) for record in rollout.captured.records],
            "messages": rollout.turns,
            "events": [{"seq": stored.seq, **msgspec.to_builtins(stored.event)} for stored in self._events],
            "verdict": rollout.verdict,
            "log": self._log(),
            "diff": rollout.diff,
            "files": {name: len(data) for name, data in rollout.files.items()},
        }
        if part != "all":
            return parts[part]
        body = msgspec.to_builtins(msgspec.structs.replace(rollout, trajectory=None, files={}, log=b""))
        return {"rollout": body, "branches": self._branches, **parts}

    def text(self, part: str) -> str:
        """Control characters are shown as escapes: what a model or a program wrote must not steer a terminal."""
        return printable(self._text(part))

    def _text(self, part: str) -> str:
        makers = {
            "calls": self._calls,
            "messages": self._messages,
            "events": self._event_lines,
            "verdict": self._verdict,
            "log": self._log,
            "diff": lambda: self._rollout.diff or "",
            "files": self._files,
        }
        if part != "all":
            return makers[part]()
        shown = [self._head()]
        for name in ("calls", "log", "verdict", "diff", "files"):
            text = makers[name]() if name != "log" else self._rollout.log_tail
            if text.strip():
                shown.append(f"\n{name}\n{text.rstrip()}")
        shown.append(f"\nmore: rollyard show {self._rollout.id} --part messages (or events, or log)")
        return "\n".join(shown)

    def _head(self) -> str:
        r = self._rollout
        lines = [
            f"rollout {r.id}",
            f"task {r.task.id}  attempt {r.attempt}  run {r.run_id or '-'}",
            f"agent {r.agent} {r.agent_version or ''}  mode {r.mode}  sandbox {r.sandbox} ({r.isolation or '-'})",
            f"status {r.status}  reward {_number(r.reward)}  calls {r.calls}  {r.wall_s:.1f} s",
        ]
        if r.parent_rollout is not None:
            pinned = f", {r.pinned} of them and the branch point in the parent's words (pinned)" if r.pinned else ""
            how = ", resumed in its files" if r.resumed else ""
            how += f", {r.laid_over} paths made the parent's" if r.laid_over else ""
            lines.append(
                f"branches off {r.parent_rollout} at {r.parent_call}: {r.replayed} calls answered as its were{pinned}{how}"
            )
        if r.snapshots:
            lines.append(f"snapshots at {len(r.snapshots)} calls: {', '.join(r.snapshots)}")
        lines += [f"branched by run {run}" for run in self._branches.runs]
        lines += [f"branched by rollout {child}" for child in self._branches.children]
        if r.failure is not None:
            lines.append(f"failed at {r.failure.boundary} in {r.failure.stage}: {r.failure.cause}: {r.failure.message}")
        for command in r.install:
            lines.append(f"{command.command}: exit code {command.exit_code}\n{command.stdout}{command.stderr}".rstrip())
        lines += [f"  {s.name:10} {s.duration_s:8.2f} s{'  ' + s.error if s.error else ''}" for s in r.stages]
        return "\n".join(lines)

    def _calls(self) -> str:
        rows: list[tuple[str, ...]] = []
        for record in self._rollout.captured.records:
            answer = self._rollout.captured.answer(record.id)
            tokens = f"{record.usage.prompt_tokens or '?'}+{record.usage.completion_tokens or '?'}"
            how = [record.edge, *([record.break_reason] if record.break_reason else [])]
            how += [REPLAYED] if REPLAYED in record.flaws else []
            said = record.error or ("" if answer is None else _short(answer.message))
            rows.append((f"{record.seq:4}", record.kind, ", ".join(how), record.capture, tokens, said))
        return "\n".join(_align_columns(rows))

    def _messages(self) -> str:
        lines: list[str] = []
        for branch in self._rollout.captured.branches:
            lines.append(
                f"=== branch {branch.index} ({branch.kind}), {len(branch.ids or ())} tokens, {branch.trained} train"
            )
            lines += [f"[{message.role}] {_long(message)}" for message in branch.messages]
        return "\n".join(lines)

    def _event_lines(self) -> str:
        """Local time, what happened, and its fields, the texts of programs as JSON."""
        return "\n".join(
            f"{datetime.fromtimestamp(s.event.at).strftime('%H:%M:%S.%f')[:-3]}  {s.event.name}  {_fields(s.event.fields)}"
            for s in self._events
        )

    def _verdict(self) -> str:
        verdict = self._rollout.verdict
        if verdict is None:
            return ""
        lines = [f"reward {_number(verdict.reward)}  status {verdict.status}  grade {verdict.grade or '-'}"]
        lines += [f"  {name}: {_number(value)}" for name, value in verdict.parts.items()]
        lines += [f"  {name}: {'passed' if passed else 'failed'}" for name, passed in verdict.checks.items()]
        return "\n".join([*lines, verdict.log]) if verdict.log else "\n".join(lines)

    def _log(self) -> str:
        """All that the agent printed."""
        return self._rollout.log.decode("utf-8", "backslashreplace")

    def _files(self) -> str:
        return "\n".join(f"{len(data):10} {name}" for name, data in self._rollout.files.items())


def _align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell; the last goes as far as it goes."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([*map(str.ljust, row[:-1], widths), row[-1]]).rstrip() for row in rows]


def _plain(value: Any) -> str:
    """A value of a config as a person would write it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_plain(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(one) for one in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fields(fields: Mapping[str, Any]) -> str:
    shown = ((name, value) for name, value in fields.items() if value not in (None, ""))
    return "  ".join(
        f"{name}={value if isinstance(value, str) and _WORD.fullmatch(value) else msgspec.json.encode(value).decode()}"
        for name, value in shown
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _call(record: Any) -> dict[str, Any]:
    shown = {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(record).items()}
    for name in ("tools_digest", "raw_request", "raw_response"):
        shown[name] = getattr(record, name).hex() or None
    return shown


def _short(message: Message) -> str:
    text = " ".join(_long(message).split())
    return text if len(text) <= _CUT else f"{text[:_CUT]} ..."


def _long(message: Message) -> str:
    parts = [message.text] if message.text else []
    parts += [f"{call.name}({call.arguments})" for call in message.tool_calls]
    parts += ["".join(getattr(part, "text", "") for part in result.parts) for result in message.tool_results]
    return "\n".join(parts)
