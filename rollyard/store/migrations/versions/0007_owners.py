"""The control plane: an owner for environments, snapshots and bundles; the signing secrets leave the database."""

import re

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def _snapshot_id(image: str) -> str:
    found = re.search(r"snap_[A-Za-z0-9]{20,}", image)
    return found[0] if found else image


def upgrade() -> None:
    op.add_column("plane_envs", sa.Column("owner", sa.String(), nullable=False, server_default="admin"))
    op.create_table(
        "plane_owned",
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "name", "owner"),
    )
    op.execute("INSERT INTO plane_owned SELECT 'bundle', digest, owner, created_at FROM plane_blobs")
    taken = op.get_bind().execute(
        sa.text(
            "SELECT DISTINCT h.reason, i.owner, i.created_at FROM plane_history h "
            "JOIN plane_instances i ON i.id = h.instance_id WHERE h.reason LIKE 'snapshot %'"
        )
    )
    rows = {(_snapshot_id(reason.removeprefix("snapshot ")), owner): at for reason, owner, at in taken}
    insert = sa.text("INSERT INTO plane_owned VALUES ('snapshot', :name, :owner, :at)")
    for (name, owner), at in rows.items():
        op.get_bind().execute(insert, {"name": name, "owner": owner, "at": at})
    op.execute("DELETE FROM plane_leases WHERE name IN ('signing', 'faces')")
