"""The control plane's records in Redis: `change.py` how a change is made all or nothing, `rows.py` what lies under which key,
`store.py` the operations. Runs, rollouts and calls need SQL and are never here."""

from rollyard.plane.storage.redis.store import RedisPlane, open_redis

__all__ = ["RedisPlane", "open_redis"]
