"""Rollouts whose texts are not in the index are found without walking past all texts."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    named = sa.text("place = 'task'")
    op.create_index("texts_kept", "texts", ["rollout_id"], sqlite_where=named, postgresql_where=named)
