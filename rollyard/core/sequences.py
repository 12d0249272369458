"""Sequences as callers give them. To Python a string is a sequence too, of its characters, and that is never what was meant:
one shell command is taken as a sequence of one, any other string is refused by the name of the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from rollyard.core.errors import ConfigError

T = TypeVar("T")


def as_commands(value: str | Iterable[str], name: str) -> tuple[str, ...]:
    """Shell commands; a string is one."""
    found = (value,) if isinstance(value, str) else as_tuple(value, name)
    for command in found:
        if not isinstance(command, str):
            raise ConfigError(f"{name}: a command is a string, not {command!r}", hint=f'{name}=["make test"]')
    return found


def as_tuple(value: Iterable[T], name: str) -> tuple[T, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}: a list, not {value!r}", hint=f"{name}=[...]")
    return tuple(value)


def check_sequences(struct: msgspec.Struct, *, commands: tuple[str, ...] = ()) -> None:
    """For a `__post_init__`, since a struct that is made by hand is not validated: no field that is a tuple by default holds a
    string. Those that are `commands` take one."""
    for name in _sequences(type(struct)):
        value: Any = getattr(struct, name)
        if isinstance(value, (str, bytes)):
            where = f"{type(struct).__name__}.{name}"
            found = as_commands(value, where) if name in commands and isinstance(value, str) else as_tuple(value, where)
            msgspec.structs.force_setattr(struct, name, found)


@cache
def _sequences(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    fields, defaults = kind.__struct_fields__, kind.__struct_defaults__
    pairs = zip(fields[len(fields) - len(defaults) :], defaults, strict=True)
    return tuple(name for name, default in pairs if isinstance(default, tuple))
