"""Who is asking: API keys by their sha256, roles, and what a caller may see.

An admin sees everything. Everybody else sees what belongs to their owner; another owner's instance does not exist for them.
An agent's key may be narrowed to one instance.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable

import msgspec

from rollyard.core.errors import PlaneForbidden, PlaneInvalid, PlaneNotFound, PlaneUnauthorized
from rollyard.core.ids import new_id, secret
from rollyard.core.plane import KEYLESS_OWNER, POOL_OWNER, ROLES, ApiKey, EnvRecord, Instance, Role
from rollyard.plane.service.request_note import note_caller
from rollyard.plane.storage.protocol import PlaneStore

KNOWN_S = 1.0
_MOST_KNOWN = 10_000
HIDDEN = "[hidden]"
_SNAPSHOT = re.compile(r"snap_[A-Za-z0-9]{20,}")  # in whatever our own engines call theirs


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Role
    owner: str
    instance_id: str | None = None


class Access:
    def __init__(self, store: PlaneStore, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._known: dict[bytes, tuple[float, ApiKey]] = {}  # found a moment ago

    async def issue(self, new: NewKey, *, text: str | None = None) -> tuple[ApiKey, str]:
        """The key as it is kept, and the text that is shown this once."""
        if new.role not in ROLES or not new.owner.strip():
            raise PlaneInvalid(f"a key has an owner and one of the roles {', '.join(ROLES)}")
        if new.instance_id is not None and new.role != "agent":
            raise PlaneInvalid("only an agent's key is narrowed to an instance")
        text = text or secret("ryk")
        key = ApiKey(
            id=new_id("key"),
            digest=_digest(text),
            role=new.role,
            owner=new.owner,
            instance_id=new.instance_id,
            created_at=self._clock(),
        )
        return await self._store.put_key(key), text

    async def admin(self, text: str) -> ApiKey:
        """The key that the server was started with; the same one again is the same key."""
        return await self.find_or_make(text, "admin", "admin")

    async def find_or_make(self, text: str, role: Role, owner: str) -> ApiKey:
        """The key of this text, made where it is not known yet."""
        return (
            await self._store.find_key(_digest(text))
            or (await self.issue(NewKey(role=role, owner=owner), text=text))[0]
        )

    async def revoke(self, key_id: str) -> None:
        """At once here; another replica may let it in for `KNOWN_S` more."""
        await self._store.revoke_key(key_id, at=self._clock())
        self._known.clear()

    async def caller(self, header: str | None, *, metrics: bool = False) -> ApiKey:
        """Whose key it is. A key for reading metrics opens nothing else: `metrics` is where the caller looks at roles."""
        found = await self._find(header)
        if found.role == "metrics" and not metrics:
            raise PlaneForbidden("a key of role metrics may not do this", hint="it reads /metrics and nothing else")
        return found

    async def _find(self, header: str | None) -> ApiKey:
        digest, now = _digest(bearer(header)), time.monotonic()
        at, known = self._known.get(digest, (-KNOWN_S, None))
        if known is not None and now - at < KNOWN_S:
            note_caller(known)
            return known
        found = await self._store.find_key(digest)
        if found is None:
            self._known.pop(digest, None)
            raise PlaneUnauthorized("this API key is unknown or revoked")
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[digest] = (now, found)
        note_caller(found)
        return found


def bearer(header: str | None) -> str:
    scheme, _, text = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not text.strip():
        raise PlaneUnauthorized("no API key", hint="send Authorization: Bearer KEY")
    return text.strip()


def owner_for(caller: ApiKey, requested: str | None) -> str:
    """On whose account: an admin may name any owner, others only themselves."""
    if requested is None or requested == caller.owner:
        return caller.owner
    if caller.role != "admin":
        raise PlaneForbidden("only an admin acts for another owner")
    return requested


def check_visible(caller: ApiKey, instance: Instance) -> None:
    own = caller.role == "admin" or caller.owner == instance.owner
    if not own or caller.instance_id not in (None, instance.id):
        raise PlaneNotFound(f"there is no instance {instance.id}")


def check_may_change(caller: ApiKey, record: EnvRecord) -> None:
    """An environment is changed by its owner or an admin, since others run it."""
    if caller.role != "admin" and caller.owner != record.owner:
        raise PlaneForbidden(f"{record.id} belongs to another owner", hint="push it under another name")


def show_env(caller: ApiKey, record: EnvRecord) -> EnvRecord:
    """What this caller may read of an environment: the values of its variables are its owner's. Those who bear no key see
    only what was made without one."""
    if caller.owner == KEYLESS_OWNER and record.owner != KEYLESS_OWNER:
        raise PlaneNotFound(f"there is no environment {record.id}")
    if caller.role == "admin" or (caller.owner == record.owner and caller.role != "agent"):
        return record
    hidden = msgspec.structs.replace(record.spec, env=dict.fromkeys(record.spec.env, HIDDEN), extra={})
    return msgspec.structs.replace(record, spec=hidden)


def is_snapshot(image: str) -> bool:
    return _SNAPSHOT.search(image) is not None


def snapshot_id(image: str) -> str:
    """One name for a snapshot, however its engine lets an image be named (with a registry or without, by tag or alone)."""
    found = _SNAPSHOT.search(image)
    return found[0] if found else image


async def check_image(store: PlaneStore, image: str, owner: str) -> None:
    """A snapshot of an instance opens for its owner, whatever it is called by. One that nobody owns, made before there were
    owners or beside this plane, opens for nobody until an admin gives it away in an environment."""
    if image == "host":
        return
    owners = await store.owners_of("snapshot", snapshot_id(image))
    if (owners or is_snapshot(image)) and owner not in owners and not owner.startswith(POOL_OWNER):
        raise PlaneNotFound(f"there is no image {image}")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
