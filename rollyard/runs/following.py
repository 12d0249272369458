"""Following a run through its store: the same displays as the runner's own, fed by the events it commits."""

from __future__ import annotations

import sys

import anyio

from rollyard.core.errors import ConfigError
from rollyard.runs.progress import Display, display
from rollyard.store import Store

_EVERY_S = 0.3


async def follow(where: str, run: str | None, style: str) -> None:
    """Until no attempt of the run is owed or leased. A runner that died shows as attempts that stay leased."""
    async with Store.open(where) as store:
        run_id = await _chosen(store, run)
        with display(style, sys.stdout) as shown:
            await _follow(store, run_id, shown)


async def _chosen(store: Store, run: str | None) -> str:
    if run is not None:
        kind, found = await store.resolve(run)
        if kind != "run":
            raise ConfigError(f"{run!r} is a rollout; watch takes a run")
        return found
    newest = await store.list_runs(limit=1)
    if not newest:
        raise ConfigError("this store holds no run yet", hint="start one with `rollyard run`")
    return newest[0].id


async def _follow(store: Store, run_id: str, shown: Display) -> None:
    info = await store.get_run(run_id)
    owed = info.attempts.get("owed", 0) + info.attempts.get("leased", 0)
    shown.begin(run_id, owed, sum(info.attempts.values()) - owed)
    seen: set[str] = {r.id async for r in store.rollouts(run_id)} if owed else set()
    after = 0
    while True:
        for stored in await store.events(run_id=run_id, after=after):
            after = stored.seq
            await shown.event(stored.event)
        async for rollout in store.rollouts(run_id):
            if rollout.id not in seen:
                seen.add(rollout.id)
                shown.rollout(rollout)
        if (await store.get_run(run_id)).finished:
            return
        await anyio.sleep(_EVERY_S)
