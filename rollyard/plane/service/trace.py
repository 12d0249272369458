"""The chain behind one id: environment version, instance, gate session, rollout, reward, policy version.

What links them is the rollout's id: an instance bears it from its creation or from a later link, and the gate's session and the
rollout are kept under it. What is not known is null; on Redis, which holds no runs, that is everything from the session on.
"""

from __future__ import annotations

from typing import Any

from rollyard.core.errors import Error, PlaneNotFound
from rollyard.core.plane import ApiKey, EnvRecord, Instance
from rollyard.core.rollout import Rollout
from rollyard.plane.service.access import sees, show_env
from rollyard.plane.service.shapes import env_json, instance_json, rfc3339
from rollyard.plane.storage.protocol import PlaneStore
from rollyard.store import Store


class Traces:
    def __init__(self, store: PlaneStore, runs: Store | None) -> None:
        self._store, self._runs = store, runs

    async def chain(self, trace_id: str, caller: ApiKey) -> dict[str, Any]:
        """By an instance's or a rollout's id. A rollout that no instance is for is shown to admins only."""
        instance = await self._instance(trace_id)
        rollout_id = instance.rollout_id if instance is not None and instance.id == trace_id else trace_id
        if instance is not None:
            sees(caller, instance)
        elif caller.role != "admin":
            raise PlaneNotFound(f"nothing is known about {trace_id}")
        runs = await self._of_runs(rollout_id)
        if instance is None and runs["rollout"] is None and runs["session"] is None:
            raise PlaneNotFound(f"nothing is known about {trace_id}")
        env = await self._env(instance)
        shown = {
            "env": None if env is None else env_json(show_env(caller, env)),
            "instance": None if instance is None else instance_json(instance),
        }
        return {"id": trace_id, "rollout_id": rollout_id, **shown, **runs}

    async def _instance(self, trace_id: str) -> Instance | None:
        try:
            return await self._store.get_instance(trace_id)
        except PlaneNotFound:
            found = await self._store.list_instances(
                owner=None, env=None, run_id=None, rollout_id=trace_id, live=None, labels={}, after="", limit=1
            )
        return found[0] if found else None

    async def _env(self, instance: Instance | None) -> EnvRecord | None:
        if instance is None or instance.env is None:
            return None
        try:
            return await self._store.get_env(*instance.env.split("@", 1))
        except PlaneNotFound:
            return None  # it was deleted since

    async def _of_runs(self, rollout_id: str | None) -> dict[str, Any]:
        shown: dict[str, Any] = {"session": None, "rollout": None, "reward": None, "policy": None}
        if self._runs is None or rollout_id is None:
            return shown
        session = await self._runs.session(rollout_id)
        if session is not None:
            shown["session"] = {"created_at": rfc3339(session.created_at), "closed_at": rfc3339(session.closed_at)}
        try:
            rollout = await self._runs.get_rollout(rollout_id)
        except Error:
            rollout = None  # it is under way, or not of this store
        if rollout is not None:
            shown |= {"rollout": _rollout(rollout), "reward": rollout.reward}
        records, _ = await self._runs.load_calls(rollout_id)
        if records:
            ends = {v for record in records for v in (record.version_start, record.version_end) if v is not None}
            models = {record.model_served or record.model_requested for record in records}
            shown["policy"] = {"versions": sorted(ends), "models": sorted(models), "calls": len(records)}
        return shown


def _rollout(rollout: Rollout) -> dict[str, Any]:
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
