"""What the page's forms do for the one with the admin key: keys, and the terms of owners."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from rollyard.core.errors import PlaneInvalid
from rollyard.core.plane import ROLES, ApiKey
from rollyard.plane.service.access import Access, NewKey
from rollyard.plane.service.owner_terms import OwnerTerms, set_owner_terms
from rollyard.plane.storage.protocol import PlaneStore


class PlaneOperator:
    def __init__(self, store: PlaneStore, access: Access, admin_key: str) -> None:
        self._store, self._access = store, access
        self.form_token = hmac.new(admin_key.encode(), b"forms of the page", hashlib.sha256).hexdigest()

    async def list_keys(self) -> Sequence[ApiKey]:
        return await self._store.list_keys()

    async def new_key(self, role: str, owner: str, instance_id: str | None) -> str:
        if role not in ROLES:
            raise PlaneInvalid(f"{role!r} is no role of a key: it is one of {', '.join(ROLES)}")
        wanted = msgspec.convert({"role": role, "owner": owner, "instance_id": instance_id}, NewKey)
        return (await self._access.issue(wanted))[1]

    async def revoke_key(self, key_id: str) -> None:
        await self._access.revoke(key_id)

    async def set_terms(self, owner: str, quota: int | None, rate: float | None) -> None:
        if not owner:
            raise PlaneInvalid("whose quota?")
        await set_owner_terms(self._store, owner, OwnerTerms(quota=quota, rate=rate))
