"""The tables, once, for SQLite and PostgreSQL. Migrations lead here; a test compares the two.

A call's row, the hot one, holds its values as msgpack beside the columns people filter by; the rest is JSON text, so that a
shell with `sqlite3` is enough to look around. Token ids and logprobs are packed arrays, little-endian.
"""

from __future__ import annotations

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    event,
)

HEAD = "0014"  # the newest migration

metadata = MetaData()

# a row number that both databases count up by themselves
_Serial = BigInteger().with_variant(Integer, "sqlite")

sessions = Table(
    "sessions",
    metadata,
    Column("rollout_id", String, primary_key=True),
    Column("key_hash", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("closed_at", Float),
    Column("settings", Text, nullable=False),
    Column("attempt_id", String),  # the claim it works under; None outside a run
    Column("fence", Integer),
    Index("sessions_of_attempt", "attempt_id"),
)

calls = Table(
    "calls",
    metadata,
    Column("rollout_id", String, primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("edge", String, nullable=False),
    Column("parent_call_id", String),
    Column("break_reason", String),
    Column("model", String, nullable=False),
    Column("capture", String, nullable=False),
    Column("finish", String),
    Column("error", Text),
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("received_at", Float, nullable=False),
    Column("finished_at", Float),
    Column("record", LargeBinary, nullable=False),
    Column("nodes", LargeBinary),  # that it added, or placed anew
    Column("bodies", LargeBinary),  # that are its own
)

blobs = Table(
    "blobs",  # bodies that are shared, and all of stores that were made before calls had their own
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("size", BigInteger, nullable=False),  # of the whole body
    Column("encoding", String, nullable=False),  # raw, zlib, delta
    Column("data", LargeBinary, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", String, primary_key=True),
    Column("created_at", Float, nullable=False),
    Column("config", Text, nullable=False),
)

jobs = Table(
    "jobs",  # runs that a server was asked for
    metadata,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("key", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("run_id", String, nullable=False),
    Column("state", String, nullable=False),
    Column("error", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    UniqueConstraint("owner", "key", name="jobs_once"),
    Index("jobs_by_state", "state", "id"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", String, primary_key=True),
    Column("run_id", String, nullable=False),
    Column("position", Integer, nullable=False),  # the order in which attempts are handed out
    Column("task_id", String, nullable=False),
    Column("task_digest", String, nullable=False),
    Column("agent", String, nullable=False),
    Column("policy", String, nullable=False),
    Column("number", Integer, nullable=False),
    Column("seed", BigInteger),
    Column("state", String, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("owner", String),
    Column("expires_at", Float),
    Column("rollout_id", String),
    Column("image", String, nullable=False, server_default=""),  # what a machine must fetch or build for it
    Column("gpus", Integer, nullable=False, server_default="0"),  # that a machine must have
    UniqueConstraint("run_id", "task_id", "agent", "policy", "number", name="attempts_once"),
    Index("attempts_claim", "run_id", "state", "position"),
)

seats = Table(
    "seats",  # what the last transaction of one writer left, so that it can be asked about (PostgreSQL)
    metadata,
    Column("id", String, primary_key=True),
    Column("token", LargeBinary, nullable=False),
)

pauses = Table(
    "pauses",  # until when a run hands out nothing that this policy answers
    metadata,
    Column("run_id", String, primary_key=True),
    Column("policy", String, primary_key=True),
    Column("until", Float, nullable=False),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", String, primary_key=True),
    Column("run_id", String),
    Column("task_id", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("group_id", String),
    Column("agent", String, nullable=False),
    Column("mode", String, nullable=False),
    Column("status", String, nullable=False),
    Column("reward", Float),
    Column("boundary", String),
    Column("calls", Integer, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("wall_s", Float, nullable=False),
    Column("fence", Integer),
    Column("task", LargeBinary, nullable=False),  # digest of the task's body
    Column("body", Text, nullable=False),
    Column("policy", String),
    Column("cause", String),
    Column("prompt_tokens", BigInteger),
    Column("completion_tokens", BigInteger),
    Column("cached_tokens", BigInteger),
    Column("merged_calls", BigInteger),  # these five are NULL where no tokens were captured
    Column("merged_rows", BigInteger),
    Column("call_tokens", BigInteger),
    Column("row_tokens", BigInteger),
    Column("tree_tokens", BigInteger),
    Index("rollouts_of_run", "run_id", "id"),
    Index("rollouts_by_time", "started_at"),
)

# Everything a list of rollouts shows, so that SQLite answers one from the index and never walks past the bodies. PostgreSQL
# keeps large bodies out of line by itself.
Index(
    "rollouts_lines",
    *(
        rollouts.c[name]
        for name in (
            "run_id",
            "id",
            "task_id",
            "attempt",
            "group_id",
            "agent",
            "policy",
            "mode",
            "status",
            "reward",
            "boundary",
            "cause",
            "calls",
            "prompt_tokens",
            "completion_tokens",
            "started_at",
            "wall_s",
            "cached_tokens",
            "merged_calls",
            "merged_rows",
            "call_tokens",
            "row_tokens",
            "tree_tokens",
        )
    ),
).ddl_if(dialect="sqlite")

verdicts = Table(
    "verdicts",
    metadata,
    Column("id", _Serial, primary_key=True),
    Column("rollout_id", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("reward", Float),
    Column("status", String, nullable=False),
    Column("body", Text, nullable=False),
    Index("verdicts_of_rollout", "rollout_id", "id"),
)

notes = Table(
    "notes",  # what people say about a rollout
    metadata,
    Column("id", _Serial, primary_key=True),
    Column("rollout_id", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("author", String, nullable=False),
    Column("kind", String, nullable=False),  # note, label, score
    Column("name", String, nullable=False),  # of a label or score; empty for a note
    Column("text", Text, nullable=False),
    Column("score", Float),
    Index("notes_of_rollout", "rollout_id", "id"),
)

texts = Table(
    "texts",  # what rollouts said and did, for searching; made when a rollout ends, or when the first search finds none
    metadata,
    Column("id", _Serial, primary_key=True),
    Column("rollout_id", String, nullable=False),
    Column("place", String, nullable=False),
    Column("call", Integer),  # number of the model call that first held it
    Column("body", Text, nullable=False),
    Index("texts_of_rollout", "rollout_id", "id"),
)
# One row, which says what the rollout is called, for each rollout whose texts are in: finding those whose are not must not walk
# past all texts. As text, since `postgresql_where` loads two megabytes of PostgreSQL's dialect into every gate.
event.listen(texts, "after_create", DDL("CREATE INDEX texts_kept ON texts (rollout_id) WHERE place = 'task'"))
WORDS = "texts_words"  # the full-text index: a virtual table on SQLite, an index on PostgreSQL
for _statement in (
    "CREATE VIRTUAL TABLE texts_words USING fts5(body, content='texts', content_rowid='id')",
    "CREATE TRIGGER texts_added AFTER INSERT ON texts BEGIN "
    "INSERT INTO texts_words(rowid, body) VALUES (new.id, new.body); END",
    "CREATE TRIGGER texts_removed AFTER DELETE ON texts BEGIN "
    "INSERT INTO texts_words(texts_words, rowid, body) VALUES ('delete', old.id, old.body); END",
):
    event.listen(texts, "after_create", DDL(_statement).execute_if(dialect="sqlite"))
_gin = DDL("CREATE INDEX texts_words ON texts USING gin (to_tsvector('simple', body))")
event.listen(texts, "after_create", _gin.execute_if(dialect="postgresql"))

events = Table(
    "events",
    metadata,
    Column("seq", _Serial, primary_key=True),
    Column("rollout_id", String),
    Column("run_id", String),
    Column("at", Float, nullable=False),
    Column("name", String, nullable=False),
    Column("fields", Text, nullable=False),
    Index("events_of_rollout", "rollout_id", "seq"),
    Index("events_of_run", "run_id", "seq"),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("rollout_id", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("collected", Boolean, nullable=False),  # a file of the rollout itself, rather than one kept beside it
)

plane_envs = Table(
    "plane_envs",
    metadata,
    Column("name", String, primary_key=True),
    Column("version", String, primary_key=True),
    Column("revision", Integer, nullable=False),
    Column("status", String, nullable=False),
    Column("spec", Text, nullable=False),
    Column("words", Text, nullable=False),  # what a search looks through, in lower case
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("released_at", Float),
    Column("owner", String, nullable=False, server_default="admin"),
)

plane_instances = Table(
    "plane_instances",
    metadata,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("env", String),
    Column("run_id", String),
    Column("engine", String, nullable=False),
    Column("ref", String),
    Column("state", String, nullable=False),
    Column("live", Boolean, nullable=False),
    Column("plan", Text, nullable=False),
    Column("labels", Text, nullable=False),
    Column("reason", Text),
    Column("idle_ttl_s", Float),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("last_seen_at", Float, nullable=False),
    Column("settle_by", Float, nullable=False),
    Column("ended_at", Float),
    Column("rollout_id", String),
    Index("plane_instances_of_owner", "owner", "live", "id"),
    Index("plane_instances_due", "live", "expires_at"),
    Index("plane_instances_of_rollout", "rollout_id"),
    Index("plane_instances_changed", "updated_at", "id"),
)

plane_labels = Table(
    "plane_labels",
    metadata,
    Column("instance_id", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("value", String, nullable=False),
    Index("plane_labels_by_value", "name", "value"),
)

plane_history = Table(
    "plane_history",
    metadata,
    Column("seq", _Serial, primary_key=True),
    Column("instance_id", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", Text),
    Index("plane_history_of_instance", "instance_id", "seq"),
)

plane_owners = Table(
    "plane_owners",
    metadata,
    Column("owner", String, primary_key=True),
    Column("used", Integer, nullable=False),
    Column("quota", Integer),
    Column("rate", Float),  # creations a second
    Column("next_at", Float, nullable=False, server_default="0"),  # when one more creation is on time
)

plane_pools = Table(
    "plane_pools",
    metadata,
    Column("name", String, primary_key=True),
    Column("size", Integer, nullable=False),
    Column("plan", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)

plane_blobs = Table(
    "plane_blobs",  # bundles of environments, by the hexadecimal sha256 of their bytes
    metadata,
    Column("digest", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

plane_owned = Table(
    "plane_owned",  # whose a snapshot or a bundle is; the same bytes may belong to several
    metadata,
    Column("kind", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("owner", String, primary_key=True),
    Column("created_at", Float, nullable=False),
)

plane_requests = Table(
    "plane_requests",  # creations that named an Idempotency-Key
    metadata,
    Column("caller", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("instance_id", String, nullable=False),
    Column("created_at", Float, nullable=False),
)

plane_keys = Table(
    "plane_keys",
    metadata,
    Column("id", String, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("role", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("instance_id", String),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
    Index("plane_keys_by_digest", "digest", unique=True),
)

plane_records = Table(
    "plane_records",  # what the compatible APIs keep beside instances
    metadata,
    Column("kind", String, primary_key=True),
    Column("scope", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("data", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("due_at", Float),  # when a server has to take it up
    Index("plane_records_due", "kind", "due_at"),
)

plane_leases = Table(
    "plane_leases",
    metadata,
    Column("name", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("expires_at", Float, nullable=False),
)
