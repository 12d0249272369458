"""32 writers in a process of its own: each adds its tag by compare-and-swap and takes part in a race for an owner's quota.
Prints how many instances it was let in with."""

import asyncio
import sys

from rollyard.core.errors import PlaneConflict, PlaneQuota
from rollyard.core.ids import new_id
from rollyard.core.plane import AdmissionTerms, EnvSpec, Instance, InstancePlan
from rollyard.plane.storage.open import open_plane


async def add(store, tag):
    while True:
        seen = await store.get_env("e", "1")
        try:
            spec = EnvSpec(tags=(*seen.spec.tags, tag))
            return await store.update_env("e", "1", spec, revision=seen.revision, at=1.0)
        except PlaneConflict:
            await asyncio.sleep(0.002)


def instance(owner, now=1.0, **more):
    times = {name: now for name in ("created_at", "updated_at", "last_seen_at")}
    more = {"state": "creating", "expires_at": now + 60, "settle_by": now + 60, **more}
    return Instance(id=new_id("inst"), owner=owner, engine="noop", live=True, plan=InstancePlan(), **times, **more)


async def enter(store):
    try:
        await store.begin(instance("ann"), terms=AdmissionTerms(quota=40), request=None)
    except PlaneQuota:
        return 0
    return 1


async def main(url, name):
    async with open_plane(url) as (store, _):
        await asyncio.gather(*(add(store, f"{name}-{n}") for n in range(32)))
        print(sum(await asyncio.gather(*(enter(store) for _ in range(32)))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
