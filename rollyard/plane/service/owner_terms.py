"""What an owner may have: how many instances at once, and how many new ones a second."""

from __future__ import annotations

import msgspec

from rollyard.core.errors import PlaneInvalid
from rollyard.core.plane import OwnerUsage
from rollyard.plane.storage.protocol import PlaneStore


class OwnerTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays; null means the server's default. A rate is creations a second."""

    quota: int | msgspec.UnsetType | None = msgspec.UNSET
    rate: float | msgspec.UnsetType | None = msgspec.UNSET


async def set_owner_terms(store: PlaneStore, owner: str, update: OwnerTerms) -> OwnerUsage:
    terms = {k: v for k, v in msgspec.structs.asdict(update).items() if v is not msgspec.UNSET}
    if not terms:
        raise PlaneInvalid("give a quota or a rate")
    if any(value is not None and not 0 <= value < 2**31 for value in terms.values()):
        raise PlaneInvalid("a quota and a rate are numbers from 0, or null for the server's default")
    return await store.set_terms(owner, **terms)
