"""A call is one row: the nodes it added and its own bodies lie in it. What a rollout's nodes were goes to its first call; bodies
that are there already stay where they are, since shared ones are kept there anyway."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import context, op

revision = "0014"
down_revision = "0013"

AT_ONCE = 20  # rollouts: some hold long conversations


def upgrade() -> None:
    op.add_column("calls", sa.Column("nodes", sa.LargeBinary(), nullable=True))
    op.add_column("calls", sa.Column("bodies", sa.LargeBinary(), nullable=True))
    _fill(op.get_bind())
    op.drop_table("nodes")


def _fill(connection: sa.Connection) -> None:
    progress = context.config.attributes["progress"]
    progress.total = connection.execute(sa.text("SELECT count(*) FROM calls")).scalar_one()
    first = sa.text(
        "SELECT rollout_id, min(seq) AS seq, count(*) AS calls FROM calls WHERE rollout_id > :last "
        "GROUP BY rollout_id ORDER BY rollout_id LIMIT :count"
    )
    within = sa.text("SELECT * FROM nodes WHERE rollout_id >= :first AND rollout_id <= :last ORDER BY rollout_id, id")
    change = sa.text("UPDATE calls SET nodes = :nodes WHERE rollout_id = :rollout_id AND seq = :seq")
    last = ""
    while rollouts := connection.execute(first, {"last": last, "count": AT_ONCE}).all():
        seqs = {row.rollout_id: row.seq for row in rollouts}
        last = rollouts[-1].rollout_id
        progress.add(sum(row.calls for row in rollouts))
        rows = connection.execute(within, {"first": rollouts[0].rollout_id, "last": last})
        for rollout_id, of_one in groupby(rows, key=lambda row: row.rollout_id):
            if rollout_id in seqs:
                packed = {"nodes": _pack(of_one), "rollout_id": rollout_id, "seq": seqs[rollout_id]}
                connection.execute(change, packed)


def _pack(rows: Iterable[Any]) -> bytes:
    return msgspec.msgpack.encode(
        [
            (
                row.id, row.parent, row.call_id, bool(row.sampled), row.same_as, _raw(row.message),
                row.ids, row.logprobs, _raw(row.rest),
            )
            for row in rows
        ]
    )  # fmt: skip


def _raw(packed: bytes | None) -> msgspec.Raw | None:
    return None if packed is None else msgspec.Raw(packed)
