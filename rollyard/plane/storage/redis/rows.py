"""What lies under which key, and how a record becomes a hash of texts and is one again. What is None has no field."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from rollyard.core.plane import (
    ApiKey,
    EnvRecord,
    EnvSpec,
    Instance,
    InstancePlan,
    OwnedKind,
    PlaneRecord,
    RecordKind,
    WarmPool,
)
from rollyard.plane.storage.redis.change import Row

T = TypeVar("T", bound=msgspec.Struct)
BETWEEN = "\0"  # below every character of a name, so that names sort before longer ones


class Keys:
    """All of them share a hash tag, so that they share a slot of a cluster."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.envs, self.keys, self.pools = f"{prefix}envs", f"{prefix}keys", f"{prefix}pools"
        self.all, self.live = f"{prefix}instances", f"{prefix}live"
        self.due, self.changed = f"{prefix}due", f"{prefix}changed"

    def env(self, name: str, version: str) -> str:
        return f"{self._prefix}env:{name}@{version}"

    def instance(self, instance_id: str) -> str:
        return f"{self._prefix}instance:{instance_id}"

    def history(self, instance_id: str) -> str:
        return f"{self._prefix}history:{instance_id}"

    def owner(self, owner: str) -> str:
        return f"{self._prefix}owner:{owner}"

    def of_owner(self, owner: str, *, live: bool) -> str:
        return f"{self._prefix}{'live' if live else 'instances'}-of:{owner}"

    def of_rollout(self, rollout_id: str) -> str:
        return f"{self._prefix}for-rollout:{rollout_id}"

    def label(self, name: str, value: str) -> str:
        return f"{self._prefix}label:{name}={value}"

    def request(self, caller: str, name: str) -> str:
        return f"{self._prefix}request:{caller}:{name}"

    def key(self, digest: bytes) -> str:
        return f"{self._prefix}key:{digest.hex()}"

    def lease(self, name: str) -> str:
        return f"{self._prefix}lease:{name}"

    def pool(self, name: str) -> str:
        return f"{self._prefix}pool:{name}"

    def blob(self, digest: str) -> str:
        return f"{self._prefix}blob:{digest}"

    def owned(self, kind: OwnedKind, name: str) -> str:
        return f"{self._prefix}owned:{kind}:{name}"

    def record(self, kind: RecordKind, scope: str, name: str) -> str:
        return f"{self._prefix}record:{kind}:{scope}{BETWEEN}{name}"

    def records_of(self, kind: RecordKind, scope: str) -> str:
        return f"{self._prefix}records:{kind}:{scope}"

    def scopes(self, kind: RecordKind) -> str:
        return f"{self._prefix}scopes:{kind}"

    def due_records(self, kind: RecordKind) -> str:
        return f"{self._prefix}due-records:{kind}"


def env_row(record: EnvRecord) -> Row:
    words = " ".join((record.id, record.spec.description, *record.spec.tags)).lower()
    return {**_row(record, spec=_text(record.spec)), "words": words}


def env_record(row: Row) -> EnvRecord:
    fields = {"owner": "admin"} | {name: value for name, value in row.items() if name != "words"}
    return _record(EnvRecord, fields, spec=EnvSpec)


def instance_row(instance: Instance) -> Row:
    return _row(instance, plan=_text(instance.plan), labels=_text(instance.labels))


def instance_record(row: Row) -> Instance:
    return _record(Instance, row, plan=InstancePlan, labels=dict[str, str])


def due_at(instance: Instance) -> float:
    """When the sweep has to look at a live instance."""
    if instance.state not in ("running", "paused"):
        return instance.settle_by
    idle = instance.expires_at if instance.idle_ttl_s is None else instance.last_seen_at + instance.idle_ttl_s
    return min(instance.expires_at, idle)


def key_row(key: ApiKey) -> Row:
    return _row(key, digest=key.digest.hex())


def key_record(row: Row) -> ApiKey:
    return _record(ApiKey, {**row, "digest": ""}, digest_bytes=bytes.fromhex(row["digest"]))


def pool_row(pool: WarmPool) -> Row:
    return _row(pool)


def pool_record(row: Row) -> WarmPool:
    return _record(WarmPool, row)


def record_row(record: PlaneRecord) -> Row:
    return _row(record)


def plane_record(row: Row) -> PlaneRecord:
    return _record(PlaneRecord, row)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _row(record: msgspec.Struct, **texts: str) -> Row:
    row: Row = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name in texts:
            row[name] = texts[name]
        elif isinstance(value, bool):
            row[name] = "true" if value else "false"
        elif value is not None:
            row[name] = value if isinstance(value, str) else repr(value)
    return row


def _record(kind: type[T], row: Row, *, digest_bytes: bytes | None = None, **parts: Any) -> T:
    """Texts become what the type says; `parts` are JSON."""
    fields: dict[str, Any] = {
        name: msgspec.json.decode(value, type=parts[name]) if name in parts else value for name, value in row.items()
    }
    plain = {name: value for name, value in fields.items() if name not in parts}
    if digest_bytes is not None:
        plain["digest"] = digest_bytes
    made: dict[str, Any] = {}
    hints = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in plain.items():
        made[name] = value if isinstance(value, bytes) else msgspec.convert(value, hints[name], strict=False)
    return kind(**made, **{name: fields[name] for name in parts if name in fields})
