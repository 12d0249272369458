"""Following a run through its store, from any terminal that can reach it: the displays of the runner itself, fed by the events it
commits, or a table to move around in (`watch_screen.py`)."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import anyio
import msgspec

from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.events import COMMITTED, STARTED
from rollyard.runs.display.progress import Display, display, moves_cursor
from rollyard.store import Store
from rollyard.store.values import RunInfo

_EVERY_S = 0.3
_STYLES = ("auto", "table", "rich", "plain", "json")


async def follow(where: str, run: str | None, style: str) -> None:
    """Until no attempt of the run is owed or leased. A runner that died shows as attempts that stay leased."""
    style = choose_style(style, tty=moves_cursor(sys.stdout))
    async with Store.open(where, create=False) as store:
        run_id = await _choose(store, run)
        if style == "table":
            from rollyard.runs.display.watch_screen import watch_screen

            await watch_screen(store, run_id)
            return
        with display(style, sys.stdout) as shown:
            await _follow(store, run_id, shown)


class RunningRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that has begun and is not kept yet. Its task is unknown where the event is too old."""

    id: str
    stage: str = "starting"
    since: float = 0.0
    task: str = ""
    attempt: int | None = None
    agent: str = ""
    policy: str = ""


async def in_flight(store: Store, info: RunInfo) -> list[RunningRollout]:
    """The newest first; no more than there are leases, since a runner that was killed leaves events without an end."""
    leased = info.attempts.get("leased", 0)
    found: dict[str, RunningRollout] = {}
    kept: set[str] = set()
    for stored in await store.recent_events(info.id) if leased else ():
        event, rollout_id = stored.event, stored.event.rollout_id
        if rollout_id is None or rollout_id in kept:
            continue
        if event.name == COMMITTED:
            kept.add(rollout_id)
        elif event.name == "stage.started" and rollout_id not in found:
            found[rollout_id] = RunningRollout(id=rollout_id, stage=str(event.fields.get("stage")), since=event.at)
        elif event.name == STARTED:
            known = found.get(rollout_id) or RunningRollout(id=rollout_id, since=event.at)
            found[rollout_id] = msgspec.structs.replace(known, **event.fields)
    return list(found.values())[:leased]


def choose_style(style: str, *, tty: bool) -> str:
    """On a terminal, the table where textual is installed, and rich's display where it is not. Elsewhere there is no table."""
    if style not in _STYLES:
        raise UnknownName("display", style, _STYLES)
    if style != "auto" and (tty or style != "table"):
        return style
    if not tty:
        return "plain"
    try:
        return "table" if find_spec("textual") is not None else "rich"
    except ValueError:  # an entry in sys.modules that says: not here
        return "rich"


async def _choose(store: Store, run: str | None) -> str:
    if run is not None:
        kind, found = await store.resolve(run)
        if kind != "run":
            raise ConfigError(f"{run!r} is a rollout; watch takes a run", hint="`rollyard show ID` shows a rollout")
        return found
    newest = await store.list_runs(limit=1)
    if not newest:
        raise ConfigError("this store holds no run yet", hint="start one with `rollyard run`")
    return newest[0].id


async def _follow(store: Store, run_id: str, shown: Display) -> None:
    info = await store.get_run(run_id)
    owed = info.attempts.get("owed", 0) + info.attempts.get("leased", 0)
    shown.begin(run_id, owed, sum(info.attempts.values()) - owed)
    if not owed:
        async for rollout in store.rollouts(run_id):
            shown.rollout(rollout)
        return
    after = await store.latest_event()
    for stored in reversed(await store.recent_events(run_id)):  # what is in flight began before we came
        if stored.seq <= after:
            await shown.event(stored.event)
    while True:
        finished = (await store.get_run(run_id)).finished  # before the events: then the last of them are not missed
        found = await store.events(run_id=run_id, after=after)
        for stored in found:
            after = stored.seq
            await shown.event(stored.event)
            if stored.event.name == COMMITTED and stored.event.rollout_id is not None:
                shown.rollout(await store.get_rollout(stored.event.rollout_id))
        if finished and not found and not await store.has_more_events(run_id, after=after):
            return
        await anyio.sleep(_EVERY_S)
