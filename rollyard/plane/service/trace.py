"""The chain behind one id: environment version, instance, gate session, rollout, reward, policy version.

What links them is the rollout's id: an instance bears it from its creation or from a later link, and the gate's session and the
rollout are kept under it. An instance's word for its rollout is its owner's alone, who could write any id: of the rollout a
caller is shown what the rollout itself confirms, by naming the instance as its sandbox or in its labels. An admin is shown all.
What is not known is null; on Redis, which holds no runs, that is everything from the session on.
"""

from __future__ import annotations

from typing import Any

from rollyard.core.errors import Error, PlaneNotFound
from rollyard.core.plane import ApiKey, EnvRecord, Instance
from rollyard.core.rollout import Rollout
from rollyard.plane.service.access import check_visible, show_env
from rollyard.plane.service.shapes import env_json, instance_json, rfc3339
from rollyard.plane.storage.protocol import PlaneStore
from rollyard.store import Store

_MOST = 100  # instances that bear one rollout's id
_UNKNOWN: dict[str, Any] = {"session": None, "rollout": None, "reward": None, "policy": None}


class Traces:
    def __init__(self, store: PlaneStore, runs: Store | None) -> None:
        self._store, self._runs = store, runs

    async def chain(self, trace_id: str, caller: ApiKey) -> dict[str, Any]:
        """By an instance's or a rollout's id. A rollout that no instance is for is shown to admins only."""
        admin = caller.role == "admin"
        instance = await self._named_instance(trace_id)
        if instance is not None:
            check_visible(caller, instance)
        rollout_id = trace_id if instance is None else instance.rollout_id
        rollout = await self._rollout(rollout_id)
        if instance is None:
            instance = await self._instance_for(trace_id, rollout, caller)
        if instance is None and not admin:
            raise PlaneNotFound(f"nothing is known about {trace_id}")
        runs = _UNKNOWN
        if rollout_id is not None and (admin or _confirms(rollout, instance)):
            runs = await self._of_runs(rollout_id, rollout)
        if instance is None and runs["rollout"] is None and runs["session"] is None:
            raise PlaneNotFound(f"nothing is known about {trace_id}")
        env = await self._env(instance)
        shown = {
            "env": None if env is None else env_json(show_env(caller, env)),
            "instance": None if instance is None else instance_json(instance),
        }
        return {"id": trace_id, "rollout_id": rollout_id, **shown, **runs}

    async def _named_instance(self, trace_id: str) -> Instance | None:
        try:
            return await self._store.get_instance(trace_id)
        except PlaneNotFound:
            return None

    async def _instance_for(self, rollout_id: str, rollout: Rollout | None, caller: ApiKey) -> Instance | None:
        """Of those that the caller sees: the one that the rollout confirms, or else the first that bears its id."""
        owner = None if caller.role == "admin" else caller.owner
        found = await self._store.list_instances(
            owner=owner, env=None, run_id=None, rollout_id=rollout_id, live=None, labels={}, after="", limit=_MOST
        )
        seen = [one for one in found if caller.instance_id in (None, one.id)]
        return next((one for one in seen if _confirms(rollout, one)), seen[0] if seen else None)

    async def _env(self, instance: Instance | None) -> EnvRecord | None:
        if instance is None or instance.env is None:
            return None
        try:
            return await self._store.get_env(*instance.env.split("@", 1))
        except PlaneNotFound:
            return None  # it was deleted since

    async def _rollout(self, rollout_id: str | None) -> Rollout | None:
        if self._runs is None or rollout_id is None:
            return None
        try:
            return await self._runs.get_rollout(rollout_id)
        except Error:
            return None  # it is under way, or not of this store

    async def _of_runs(self, rollout_id: str, rollout: Rollout | None) -> dict[str, Any]:
        shown = dict(_UNKNOWN)
        if self._runs is None:
            return shown
        session = await self._runs.session(rollout_id)
        if session is not None:
            shown["session"] = {"created_at": rfc3339(session.created_at), "closed_at": rfc3339(session.closed_at)}
        if rollout is not None:
            shown |= {"rollout": _rollout_json(rollout), "reward": rollout.reward}
        records, _ = await self._runs.load_calls(rollout_id)
        if records:
            ends = {v for record in records for v in (record.version_start, record.version_end) if v is not None}
            models = {record.model_served or record.model_requested for record in records}
            shown["policy"] = {"versions": sorted(ends), "models": sorted(models), "calls": len(records)}
        return shown


def _confirms(rollout: Rollout | None, instance: Instance | None) -> bool:
    """Whether the rollout, as its runner wrote it down, names this instance."""
    return (
        rollout is not None and instance is not None and instance.id in (rollout.sandbox_id, *rollout.labels.values())
    )


def _rollout_json(rollout: Rollout) -> dict[str, Any]:
    verdict = rollout.verdict
    return {
        "id": rollout.id,
        "run_id": rollout.run_id,
        "task_id": rollout.task_id,
        "agent": rollout.agent,
        "mode": rollout.mode,
        "status": rollout.status,
        "started_at": rfc3339(rollout.started_at),
        "sandbox": rollout.sandbox_id,
        "verdict": None if verdict is None else verdict.status,
        "error": rollout.error,
    }
