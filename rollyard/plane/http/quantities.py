"""Quantities as Kubernetes writes them."""

from __future__ import annotations

import re
from typing import Any

from rollyard.core.errors import PlaneInvalid

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([KMGT]i?)?B?")
_BYTES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def megabytes(value: Any) -> int | None:
    """`2G`, `2Gi`, `512Mi` or bytes."""
    if value in (None, ""):
        return None
    found = _QUANTITY.fullmatch(str(value).strip())
    if found is None:
        raise PlaneInvalid(f"{value!r} is not an amount of memory such as 2Gi")
    return max(1, round(float(found[1]) * _BYTES.get(found[2] or "", 1) / 2**20))


def cores(value: Any) -> float | None:
    """`2`, `2C` or `500m`."""
    if value in (None, ""):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([Cm])?", str(value).strip())
    if found is None:
        raise PlaneInvalid(f"{value!r} is not a number of processors such as 2 or 500m")
    return float(found[1]) / (1000 if found[2] == "m" else 1)
