"""The plane's records as JSON: RFC 3339 times in UTC, and nothing that callers may not read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from rollyard.core.plane import ApiKey, EnvRecord, Instance, InstanceEvent, WarmPool


def rfc3339(at: float | None) -> str | None:
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def env_json(record: EnvRecord) -> dict[str, Any]:
    times = {name: rfc3339(getattr(record, name)) for name in ("created_at", "updated_at", "released_at")}
    return {"id": record.id, **msgspec.structs.asdict(record), **times}


def instance_json(instance: Instance) -> dict[str, Any]:
    shown = msgspec.structs.asdict(instance)
    for hidden in ("ref", "settle_by", "plan"):
        del shown[hidden]
    for name in ("created_at", "updated_at", "expires_at", "last_seen_at", "ended_at"):
        shown[name] = rfc3339(shown[name])
    return {**shown, "image": instance.plan.image, "ttl_s": instance.plan.ttl_s, "port": instance.plan.port}


def instance_event_json(line: InstanceEvent) -> dict[str, Any]:
    return {"at": rfc3339(line.at), "state": line.state, "reason": line.reason}


def pool_json(pool: WarmPool, live: int | None) -> dict[str, Any]:
    shown = {"name": pool.name, "size": pool.size, "created_at": rfc3339(pool.created_at), "live": live}
    return {**shown, "instance": msgspec.json.decode(pool.plan)}


def key_json(key: ApiKey) -> dict[str, Any]:
    shown = msgspec.structs.asdict(key)
    del shown["digest"]
    return {**shown, "created_at": rfc3339(key.created_at), "revoked_at": rfc3339(key.revoked_at)}
