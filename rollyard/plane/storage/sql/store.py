"""`SqlPlane`: the control plane's storage on SQLite and PostgreSQL. What each method promises is said in
`rollyard.plane.storage.protocol.PlaneStore`, which it has the shape of."""

from __future__ import annotations

from rollyard.plane.storage.sql import hub, instances, keys, name_owners, pools, records, survey, sweep
from rollyard.store.leases import moment
from rollyard.store.methods import Records, reads, writes


class SqlPlane(Records):
    async def now(self) -> float:
        own = self.lease_time()
        return await self.database.read(lambda connection: moment(connection, own))

    # environments
    create_env = writes(hub.create)
    get_env = reads(hub.get)
    update_env = writes(hub.replace)
    release_env = writes(hub.release)
    delete_env = writes(hub.remove)
    list_envs = reads(hub.list_envs)

    # instances
    begin = writes(instances.begin)
    step = writes(instances.step)
    end = writes(instances.end)
    touch = writes(instances.touch)
    get_instance = reads(instances.get)
    list_instances = reads(instances.list_instances)
    history = reads(instances.history_of)
    list_changed = reads(instances.list_changed)
    counts = reads(instances.counts)
    set_terms = writes(instances.set_terms)
    usage = reads(instances.usage)

    # pools and bundles
    put_pool = writes(pools.put)
    get_pool = reads(pools.get)
    list_pools = reads(pools.list_pools)
    remove_pool = writes(pools.remove)
    take = writes(pools.take)
    put_blob = writes(pools.put_blob)
    get_blob = reads(pools.get_blob)
    has_blob = reads(pools.has_blob)
    add_owner = writes(name_owners.add_owner)
    owners_of = reads(name_owners.owners_of)

    # what the compatible APIs keep
    put_records = writes(records.put)
    get_record = reads(records.get)
    list_records = reads(records.list_records)
    next_due = reads(records.next_due)
    claim_records = writes(records.claim)
    drop_records = writes(records.drop)
    drop_of_ended = writes(records.drop_of_ended)

    # keys
    put_key = writes(keys.put)
    find_key = reads(keys.find)
    list_keys = reads(keys.list_keys)
    revoke_key = writes(keys.revoke)

    # tables for people
    instances_page = reads(survey.instances)
    envs_page = reads(survey.envs)
    owners_page = reads(survey.owners)
    count_states = reads(survey.count_states)
    sweep_lease = reads(survey.sweep_lease)
    in_use = reads(survey.in_use)

    # the sweep
    agree = writes(sweep.agree)
    take_sweep = writes(sweep.take)
    claim_due = writes(sweep.claim)
    finish_due = writes(sweep.finish)
