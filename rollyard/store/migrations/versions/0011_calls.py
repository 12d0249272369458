"""Calls in the order they came, on SQLite: one that is kept inside the key's tree moves its neighbours with each insert."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    if op.get_bind().dialect.name != "sqlite":
        return
    op.rename_table("calls", "calls_before")
    op.create_table(
        "calls",
        sa.Column("rollout_id", sa.String(), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("edge", sa.String(), nullable=False),
        sa.Column("parent_call_id", sa.String(), nullable=True),
        sa.Column("break_reason", sa.String(), nullable=True),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("capture", sa.String(), nullable=False),
        sa.Column("finish", sa.String(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.Column("received_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("rollout_id", "seq"),
    )
    op.execute("INSERT INTO calls SELECT * FROM calls_before")
    op.drop_table("calls_before")
