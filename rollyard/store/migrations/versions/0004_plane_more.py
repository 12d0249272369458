"""The control plane: rates, pools, bundles, and the rollout that an instance is for."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("plane_owners", sa.Column("rate", sa.Float(), nullable=True))
    op.add_column("plane_owners", sa.Column("next_at", sa.Float(), nullable=False, server_default="0"))
    op.add_column("plane_instances", sa.Column("rollout_id", sa.String(), nullable=True))
    op.create_index("plane_instances_of_rollout", "plane_instances", ["rollout_id"], unique=False)
    op.create_index("plane_instances_changed", "plane_instances", ["updated_at", "id"], unique=False)
    op.create_table(
        "plane_pools",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "plane_blobs",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
