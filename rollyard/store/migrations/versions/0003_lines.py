"""A list of rollouts shows policy, cause and tokens, and SQLite answers it from one index."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

LINES = (
    "run_id", "id", "task_id", "attempt", "group_id", "agent", "policy", "mode", "status", "reward", "boundary", "cause",
    "calls", "prompt_tokens", "completion_tokens", "started_at", "wall_s",
)  # fmt: skip


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("policy", sa.String(), nullable=True))
    op.add_column("rollouts", sa.Column("cause", sa.String(), nullable=True))
    op.add_column("rollouts", sa.Column("prompt_tokens", sa.BigInteger(), nullable=True))
    op.add_column("rollouts", sa.Column("completion_tokens", sa.BigInteger(), nullable=True))
    _fill(op.get_bind())
    if op.get_bind().dialect.name == "sqlite":
        op.create_index("rollouts_lines", "rollouts", list(LINES), unique=False)


def _fill(connection: sa.Connection) -> None:
    """What the new columns say was in the bodies all along."""
    change = sa.text(
        "UPDATE rollouts SET policy = :policy, cause = :cause, prompt_tokens = :prompt, completion_tokens = :completion "
        "WHERE id = :id"
    )
    last = ""
    while True:
        page = sa.text("SELECT id, body FROM rollouts WHERE id > :last ORDER BY id LIMIT 200")
        rows = connection.execute(page, {"last": last}).all()
        if not rows:
            return
        for row in rows:
            body = json.loads(row.body)
            usage = body.get("usage", {})
            connection.execute(
                change,
                {
                    "id": row.id,
                    "policy": body.get("labels", {}).get("policy"),
                    "cause": (body.get("failure") or {}).get("cause"),
                    "prompt": usage.get("prompt_tokens"),
                    "completion": usage.get("completion_tokens"),
                },
            )
        last = rows[-1].id
