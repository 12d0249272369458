"""Writing TOML: the small part that task folders and agents need (the standard library only reads it)."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _is_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _write(table: Mapping[str, Any], path: str, out: list[str]) -> None:
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping) and not _is_tables(v)}
    out.extend(f"{_key(name)} = {_value(value)}" for name, value in plain.items())
    for name, value in table.items():
        where = f"{path}.{_key(name)}" if path else _key(name)
        if isinstance(value, Mapping):
            out.extend(("", f"[{where}]"))
            _write(value, where, out)
        elif _is_tables(value):
            for item in value:
                out.extend(("", f"[[{where}]]"))
                _write(item, where, out)


def dumps(table: Mapping[str, Any]) -> str:
    """`None` values must be left out by the caller: TOML has no null."""
    out: list[str] = []
    _write(table, "", out)
    return "\n".join(out).strip("\n") + "\n"
