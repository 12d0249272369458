"""Sessions belong to a claim, and policies can be paused: what many machines on one store need."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("attempt_id", sa.String(), nullable=True))
    op.add_column("sessions", sa.Column("fence", sa.Integer(), nullable=True))
    op.create_index("sessions_of_attempt", "sessions", ["attempt_id"], unique=False)
    op.create_table(
        "pauses",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "policy"),
    )
