"""Texts of rollouts for searching, notes on rollouts, and in their lines: cached tokens and how calls went into training rows."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

COUNTS = ("cached_tokens", "merged_calls", "merged_rows", "call_tokens", "row_tokens", "tree_tokens")
LINES = (
    "run_id", "id", "task_id", "attempt", "group_id", "agent", "policy", "mode", "status", "reward", "boundary", "cause",
    "calls", "prompt_tokens", "completion_tokens", "started_at", "wall_s", *COUNTS,
)  # fmt: skip


def upgrade() -> None:
    serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    sqlite = op.get_bind().dialect.name == "sqlite"
    op.create_table(
        "texts",
        sa.Column("id", serial, primary_key=True),
        sa.Column("rollout_id", sa.String(), nullable=False),
        sa.Column("place", sa.String(), nullable=False),
        sa.Column("call", sa.Integer(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
    )
    op.create_index("texts_of_rollout", "texts", ["rollout_id", "id"], unique=False)
    if sqlite:
        op.execute("CREATE VIRTUAL TABLE texts_words USING fts5(body, content='texts', content_rowid='id')")
        op.execute(
            "CREATE TRIGGER texts_added AFTER INSERT ON texts BEGIN "
            "INSERT INTO texts_words(rowid, body) VALUES (new.id, new.body); END"
        )
        op.execute(
            "CREATE TRIGGER texts_removed AFTER DELETE ON texts BEGIN "
            "INSERT INTO texts_words(texts_words, rowid, body) VALUES ('delete', old.id, old.body); END"
        )
    else:
        op.execute("CREATE INDEX texts_words ON texts USING gin (to_tsvector('simple', body))")
    op.create_table(
        "notes",
        sa.Column("id", serial, primary_key=True),
        sa.Column("rollout_id", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("author", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("score", sa.Float(), nullable=True),
    )
    op.create_index("notes_of_rollout", "notes", ["rollout_id", "id"], unique=False)
    for name in COUNTS:
        op.add_column("rollouts", sa.Column(name, sa.BigInteger(), nullable=True))
    _fill(op.get_bind())
    if sqlite:
        op.drop_index("rollouts_lines", "rollouts")
        op.create_index("rollouts_lines", "rollouts", list(LINES), unique=False)


def _fill(connection: sa.Connection) -> None:
    """What the new columns say was in the bodies all along."""
    change = sa.text(f"UPDATE rollouts SET {', '.join(f'{name} = :{name}' for name in COUNTS)} WHERE id = :id")  # noqa: S608 - our own names
    page = sa.text("SELECT id, body FROM rollouts WHERE id > :last ORDER BY id LIMIT 200")
    last = ""
    while rows := connection.execute(page, {"last": last}).all():
        for row in rows:
            body = json.loads(row.body)
            merged = body.get("merged") or {}
            counts = {name: merged.get(name.removeprefix("merged_"), 0) if merged else None for name in COUNTS}
            counts["cached_tokens"] = body.get("usage", {}).get("cached_tokens")
            connection.execute(change, {"id": row.id, **counts})
        last = rows[-1].id
