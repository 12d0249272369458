"""Attempts say which image and how many GPUs they need, so that a worker can choose among them."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("image", sa.String(), nullable=False, server_default=""))
    op.add_column("attempts", sa.Column("gpus", sa.Integer(), nullable=False, server_default="0"))
