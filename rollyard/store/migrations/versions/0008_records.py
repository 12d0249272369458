"""The control plane: what the compatible APIs keep beside instances."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "plane_records",
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("due_at", sa.Float()),
        sa.PrimaryKeyConstraint("kind", "scope", "name"),
    )
    op.create_index("plane_records_due", "plane_records", ["kind", "due_at"])
