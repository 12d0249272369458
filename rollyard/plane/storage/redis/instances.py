"""Instances, owners, pools and the sweep as changes of rows in Redis. Each function works through one `Change`; what they
promise is said in `rollyard.plane.storage.protocol.PlaneStore`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from rollyard.core.errors import LeaseLost, PlaneConflict, PlaneNotFound, PlaneQuota, PlaneRateLimited
from rollyard.core.plane import AdmissionTerms, Instance, InstanceState, OwnerUsage, PoolClaim, WarmPool
from rollyard.plane.storage.redis.change import Change, Row
from rollyard.plane.storage.redis.rows import Keys, due_at, instance_record, instance_row

Request = tuple[str, str, bytes]


class InstanceRows:
    """The operations on one plane's keys."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    # creation

    async def begin(
        self, change: Change, new: Instance, terms: AdmissionTerms, request: Request | None
    ) -> tuple[Instance, bool]:
        before = await self._find_request(change, request)
        if before is not None:
            return before, False
        await self._admit(change, new.owner, terms, new.created_at)
        await change.row(self.keys.instance(new.id))
        self._keep(change, None, new, (new.created_at, new.reason))
        self._remember(change, request, new.id)
        return new, True

    async def _find_request(self, change: Change, request: Request | None) -> Instance | None:
        if request is None:
            return None
        row = await change.row(self.keys.request(*request[:2]))
        if not row:
            return None
        if row["digest"] != request[2].hex():
            raise PlaneConflict(
                "this Idempotency-Key came with another request", hint="use a new key for a new request"
            )
        return await self.get(change, row["instance_id"])

    def _remember(self, change: Change, request: Request | None, instance_id: str) -> None:
        if request is not None:
            row = {"digest": request[2].hex(), "instance_id": instance_id}
            change.put(self.keys.request(*request[:2]), row)

    async def _admit(self, change: Change, owner: str, terms: AdmissionTerms, now: float) -> None:
        row = await change.row(self.keys.owner(owner))
        found = usage_of(owner, row)
        quota = terms.quota if found.quota is None else found.quota
        if quota is not None and found.used >= quota:
            hint = "delete one, or ask for more quota"
            raise PlaneQuota(f"{owner} has {found.used} of {quota} instances", hint=hint)
        rate = (terms.rate or 0.0) if found.rate is None else found.rate
        if rate:
            next_at = float(row.get("next_at", "0"))
            wait = next_at - now - (max(terms.burst, 1) - 1) / rate
            if wait > 0:
                raise PlaneRateLimited(
                    f"{owner} creates more than {rate:g} instances a second",
                    retry_after=wait,
                    hint=f"wait {wait:.3f} s",
                )
            row["next_at"] = repr(max(next_at, now) + 1.0 / rate)
        change.put(self.keys.owner(owner), {**row, "used": str(found.used + 1)})

    async def _give_back(self, change: Change, owner: str) -> None:
        row = await change.row(self.keys.owner(owner))
        change.put(self.keys.owner(owner), {**row, "used": str(int(row["used"]) - 1)})

    async def set_terms(self, change: Change, owner: str, terms: Mapping[str, Any]) -> OwnerUsage:
        row = await change.row(self.keys.owner(owner))
        for name, value in terms.items():
            row.pop(name, None)
            if value is not None:
                row[name] = repr(value)
        change.put(self.keys.owner(owner), {"used": "0", **row})
        return usage_of(owner, row)

    # what becomes of one

    async def get(self, change: Change, instance_id: str) -> Instance:
        row = await change.row(self.keys.instance(instance_id))
        if not row:
            raise PlaneNotFound(f"there is no instance {instance_id}")
        return instance_record(row)

    async def step(
        self,
        change: Change,
        instance_id: str,
        origin: tuple[InstanceState, ...],
        state: InstanceState,
        at: float,
        changes: Mapping[str, Any],
    ) -> Instance | None:
        row = await change.row(self.keys.instance(instance_id))
        if not row or row["state"] not in origin:
            return None
        old = instance_record(row)
        new = replace(old, state=state, updated_at=at, **changes)
        self._keep(change, old, new, (at, changes.get("reason")))
        return new

    async def end(self, change: Change, instance_id: str, state: InstanceState, at: float, reason: str | None) -> bool:
        row = await change.row(self.keys.instance(instance_id))
        if not row or row["live"] != "true":
            return False
        old = instance_record(row)
        new = replace(old, state=state, live=False, ended_at=at, updated_at=at, reason=reason)
        self._keep(change, old, new, (at, reason))
        await self._give_back(change, old.owner)
        return True

    async def touch(self, change: Change, instance_id: str, at: float, expires_at: float | None) -> Instance | None:
        row = await change.row(self.keys.instance(instance_id))
        if not row or row["state"] not in ("running", "paused"):
            return None
        old = instance_record(row)
        new = replace(old, last_seen_at=at)
        if expires_at is not None:
            new = replace(new, expires_at=expires_at, updated_at=at)
        self._keep(change, old, new, None)
        return new

    def _keep(
        self, change: Change, old: Instance | None, new: Instance, event: tuple[float, str | None] | None
    ) -> None:
        """The row, everything it is found by, and a line of history."""
        keys = self.keys
        revision = change.put(keys.instance(new.id), instance_row(new))
        before, after = self._index_scores(old) if old else {}, self._index_scores(new)
        for index in before:
            if index not in after:
                change.remove(index, new.id)
        for index, score in after.items():
            if before.get(index) != score:
                change.add(index, new.id, score)
        if event is not None:
            at, reason = event
            change.note(keys.history(new.id), str(revision), msgspec.json.encode((at, new.state, reason)).decode())

    def _index_scores(self, instance: Instance) -> dict[str, float]:
        keys = self.keys
        found = {keys.all: 0.0, keys.of_owner(instance.owner, live=False): 0.0, keys.changed: instance.updated_at}
        found |= {keys.label(name, value): 0.0 for name, value in instance.labels.items()}
        if instance.rollout_id is not None:
            found[keys.of_rollout(instance.rollout_id)] = 0.0
        if instance.live:
            found |= {keys.live: 0.0, keys.of_owner(instance.owner, live=True): 0.0, keys.due: due_at(instance)}
        return found

    # pools

    async def take(
        self,
        change: Change,
        waiting: list[str],
        pool: WarmPool,
        claim: PoolClaim,
        terms: AdmissionTerms,
        request: Request | None,
    ) -> tuple[Instance, bool] | None:
        before = await self._find_request(change, request)
        if before is not None:
            return before, False
        for instance_id in waiting:
            old = await self.get(change, instance_id)
            if old.owner == pool.owner and old.state == "running" and old.expires_at > claim.at:
                break
        else:
            return None
        await self._admit(change, claim.owner, terms, claim.at)
        await self._give_back(change, pool.owner)
        new = replace(
            old,
            owner=claim.owner,
            run_id=claim.run_id,
            rollout_id=claim.rollout_id,
            labels=claim.labels,
            idle_ttl_s=claim.idle_ttl_s,
            last_seen_at=claim.at,
            updated_at=claim.at,
        )
        self._keep(change, old, new, (claim.at, f"taken from pool {pool.name}"))
        self._remember(change, request, new.id)
        return new, True

    # the sweep

    async def check_fence(self, change: Change, fence: int) -> None:
        """The lease's revision is compared when the change is written, so a later holder undoes it."""
        if (await change.row(self.keys.lease("sweep"))).get("fence") != str(fence):
            raise LeaseLost("another replica sweeps now")

    async def claim(self, change: Change, due: list[str], fence: int, now: float, settle_s: float) -> list[Instance]:
        await self.check_fence(change, fence)
        found = [instance_record(row) for row in await change.rows([self.keys.instance(one) for one in due]) if row]
        found = [one for one in found if one.live and due_at(one) <= now]
        for old in (one for one in found if one.ends_with_its_time):
            self._keep(change, old, replace(old, state="deleting", updated_at=now, settle_by=now + settle_s), None)
        return found

    async def finish(self, change: Change, fence: int, ended: list[tuple[str, InstanceState, str]], now: float) -> int:
        await self.check_fence(change, fence)
        await change.rows([self.keys.instance(one) for one, _, _ in ended])
        return sum([await self.end(change, one, state, now, reason) for one, state, reason in ended])


def usage_of(owner: str, row: Row) -> OwnerUsage:
    quota, rate = row.get("quota"), row.get("rate")
    return OwnerUsage(
        owner=owner,
        used=int(row.get("used", "0")),
        quota=None if quota is None else int(quota),
        rate=None if rate is None else float(rate),
    )
