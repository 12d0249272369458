"""A verifier's options, out of a task's mapping: typed, unknown names refused."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.task import VerifierSpec

T = TypeVar("T", bound=msgspec.Struct)


def read_options(spec: VerifierSpec, kind: type[T]) -> T:
    try:
        return msgspec.convert(dict(spec.options), kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        field = where.rstrip("`").lstrip(".")
        at = f".{field}" if field else ""
        raise ConfigError(f"verifier {spec.kind!r}: options{at}: {message}") from error
