"""What a drill asks the database about a run: attempts lost or done twice, rewards, retries, errors, rows that stay open."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping

import asyncpg


async def count_committed(url: str, run_id: str) -> int:
    """How many rollouts a run has, asked of the database itself."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        return await connection.fetchval("SELECT count(*) FROM rollouts WHERE run_id = $1", run_id)
    finally:
        await connection.close(timeout=5)


async def wait_for(url: str, run_id: str, count: int, limit_s: float = 180.0) -> None:
    """Until a run has so many rollouts, however slow the machine is; `limit_s` without a new one is too long."""
    before, end = -1, 0.0
    while (now := await count_committed(url, run_id)) < count:
        if now > before:
            before, end = now, time.monotonic() + limit_s
        if time.monotonic() > end:
            raise TimeoutError(f"{now} rollouts of {count}, and no new one for {limit_s:.0f} s")
        await asyncio.sleep(0.1)


LOST = "SELECT count(*) FROM attempts a WHERE a.run_id = $1 AND (a.state NOT IN ('done', 'failed') OR NOT EXISTS "
LOST += "(SELECT 1 FROM rollouts r WHERE r.id = a.rollout_id AND r.fence = a.fence))"
TWICE = (
    "SELECT count(*) FROM (SELECT task_id, attempt FROM rollouts WHERE run_id = $1 GROUP BY 1, 2 HAVING count(*) > 1) x"
)
STRANGE = "SELECT count(*) FROM rollouts WHERE run_id = $1 AND boundary <> 'agent' AND reward IS NOT NULL"
# a takeover notes the time before it waits for a call that is being kept at that moment: hence the second
LATE = "SELECT count(*) FROM calls c JOIN sessions s USING (rollout_id) JOIN attempts a ON a.id = s.attempt_id "
LATE += "WHERE a.run_id = $1 AND s.fence < a.fence AND c.received_at > s.closed_at + 1 "
LATE += "AND c.received_at < extract(epoch FROM now()) + 60"  # a worker whose clock is ahead dates its calls so
OPEN = (
    "SELECT count(*) FROM sessions s JOIN attempts a ON a.id = s.attempt_id WHERE a.run_id = $1 AND s.closed_at IS NULL"
)
COUNTS = {
    "attempts": "SELECT count(*) FROM attempts WHERE run_id = $1",
    "committed": "SELECT count(*) FROM rollouts WHERE run_id = $1",
    "scored": "SELECT count(*) FROM rollouts WHERE run_id = $1 AND reward IS NOT NULL",
    "claims": "SELECT coalesce(sum(tries), 0) FROM attempts WHERE run_id = $1",
    "lost": LOST,
    "twice": TWICE,
    "reward_of_infra": STRANGE,
    "zombie_calls": LATE,
    "open_sessions": OPEN,
    "unscored": "SELECT count(*) FROM rollouts WHERE run_id = $1 AND reward IS NULL",
    "leases": "SELECT count(*) FROM attempts WHERE run_id = $1 AND state = 'leased'",
    "owed": "SELECT count(*) FROM attempts WHERE run_id = $1 AND state = 'owed'",
}


async def _tally(url: str, query: str, run_id: str) -> dict[str, int]:
    connection = await asyncpg.connect(url, timeout=30)
    try:
        return {str(row["why"]): row["n"] for row in await connection.fetch(query, run_id)}
    finally:
        await connection.close(timeout=5)


WHY = "SELECT boundary || ': ' || cause AS why, count(*) AS n FROM rollouts WHERE run_id = $1 AND reward IS NULL GROUP BY 1"


async def causes(url: str, run_id: str) -> dict[str, int]:
    """Why rollouts of a run have no reward."""
    return await _tally(url, WHY, run_id)


EVENTS = "SELECT name || ' ' || coalesce(fields::json ->> 'stage', '') AS why, count(*) AS n FROM events "
EVENTS += "WHERE run_id = $1 GROUP BY 1 ORDER BY 2 DESC LIMIT 12"


async def recent_events(url: str, run_id: str) -> dict[str, int]:
    """The events of a run's rollouts: where one that does not end is stuck."""
    return await _tally(url, EVENTS, run_id)


RETRIED = "SELECT coalesce(fields::json ->> 'cause', '') AS why, count(*) AS n FROM events "
RETRIED += "WHERE run_id = $1 AND name = 'attempt.retried' GROUP BY 1 ORDER BY 2 DESC LIMIT 12"


async def retry_reasons(url: str, run_id: str) -> dict[str, int]:
    """Why rollouts of a run were given back for another try. Claims beyond these are those of leases that ran out."""
    return await _tally(url, RETRIED, run_id)


STAGE_ERRORS = (
    "SELECT (fields::json ->> 'stage') || ': ' || (fields::json ->> 'error') AS why, count(*) AS n FROM events "
)
STAGE_ERRORS += "WHERE run_id = $1 AND name = 'stage.finished' AND fields::json ->> 'error' IS NOT NULL GROUP BY 1"
_ID = re.compile(r"\b[a-z]+[_-][0-9a-z]{8,}\b")


async def stage_errors(url: str, run_id: str) -> dict[str, int]:
    """The errors that stages of a run ended with."""
    errors: Counter[str] = Counter()
    for why, count in (await _tally(url, STAGE_ERRORS, run_id)).items():
        errors[_ID.sub("ID", why)] += count
    return dict(errors.most_common(12))


SETTLED_LOST = "SELECT count(*) FROM attempts a WHERE a.run_id = $1 AND a.state IN ('done', 'failed') AND NOT EXISTS "
SETTLED_LOST += "(SELECT 1 FROM rollouts r WHERE r.id = a.rollout_id AND r.fence = a.fence)"
SO_FAR = {name: COUNTS[name] for name in ("committed", "claims", "twice", "zombie_calls", "leases", "owed")}
SO_FAR["lost"] = SETTLED_LOST


async def account_so_far(url: str, run_id: str) -> dict[str, int]:
    """Of a run that goes on: *lost* are attempts that count as done and have no rollout."""
    return await _counts(url, SO_FAR, run_id)


async def account(url: str, run_id: str) -> dict[str, int]:
    return await _counts(url, COUNTS, run_id)


async def _counts(url: str, queries: Mapping[str, str], run_id: str) -> dict[str, int]:
    connection = await asyncpg.connect(url, timeout=30)
    try:
        return {name: int(await connection.fetchval(query, run_id)) for name, query in queries.items()}
    finally:
        await connection.close(timeout=5)
