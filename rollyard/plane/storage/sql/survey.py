"""The control plane's records as tables for people: searched, sorted and paged by the database. Reads only."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, Table, func, or_, select

from rollyard.core.plane import EnvRecord, EnvSpec, Instance, OwnerUsage
from rollyard.core.plane_tables import SweepLease, TableQuery
from rollyard.plane.storage.sql import instances as rows
from rollyard.store.schema import plane_envs, plane_instances, plane_leases, plane_owners

_SWEEP = "sweep"


def instances(connection: Connection, look: TableQuery) -> tuple[list[Instance], int]:
    """The rows wanted, and how many there are in all."""
    t = plane_instances
    found, total = _page(connection, t, look, (t.c.id, t.c.owner, t.c.env, t.c.run_id, t.c.labels), t.c.id)
    return [rows.record(row) for row in found], total


def envs(connection: Connection, look: TableQuery) -> tuple[list[EnvRecord], int]:
    t = plane_envs
    found, total = _page(connection, t, look, (t.c.words,), t.c.name)
    records = [
        EnvRecord(
            spec=msgspec.json.decode(row["spec"], type=EnvSpec),
            **{name: row[name] for name in EnvRecord.__struct_fields__ if name != "spec"},
        )
        for row in found
    ]
    return records, total


def owners(connection: Connection, look: TableQuery) -> tuple[list[OwnerUsage], int]:
    t = plane_owners
    found, total = _page(connection, t, look, (t.c.owner,), t.c.owner)
    return [
        OwnerUsage(owner=row["owner"], used=row["used"], quota=row["quota"], rate=row["rate"]) for row in found
    ], total


def count_states(connection: Connection) -> dict[tuple[str, str], int]:
    """How many instances each engine has in each state, those that are gone too."""
    t = plane_instances
    query = select(t.c.engine, t.c.state, func.count()).group_by(t.c.engine, t.c.state)
    return {(engine, state): count for engine, state, count in connection.execute(query)}


def sweep_lease(connection: Connection) -> SweepLease | None:
    row = connection.execute(select(plane_leases).where(plane_leases.c.name == _SWEEP)).first()
    return None if row is None else SweepLease(holder=row.holder, fence=row.fence, expires_at=row.expires_at)


def in_use(connection: Connection) -> bool:
    """Whether a control plane was ever here."""
    return connection.execute(select(plane_leases.c.name).limit(1)).first() is not None


def _page(
    connection: Connection,
    table: Table,
    look: TableQuery,
    searched: tuple[ColumnElement[Any], ...],
    last: ColumnElement[Any],
) -> tuple[list[Any], int]:
    def narrow(query: Select[Any]) -> Select[Any]:
        for name, value in look.same.items():
            query = query.where(table.c[name] == value)
        if look.search:
            query = query.where(or_(*(column.icontains(look.search, autoescape=True) for column in searched)))
        return query

    total = connection.execute(narrow(select(func.count()).select_from(table))).scalar_one()
    key = table.c[look.sort]
    order = (key.is_(None), key.desc() if look.descending else key.asc(), last)
    query = narrow(select(table)).order_by(*order).limit(look.limit).offset(look.offset)
    return list(connection.execute(query).mappings()), total
