"""Trees to bytes, in the format that a path's suffix names: JSON, TOML or YAML.

The standard library reads TOML and does not write it; `_toml` is that half, with nested tables written inline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from rollyard.core.errors import ConfigError

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump(path: str, content: Any) -> bytes:
    """Text and bytes are written as they are; a tree as `path`'s suffix says."""
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    if path.endswith(".json"):
        return json.dumps(content, indent=1, ensure_ascii=True).encode()
    if path.endswith(".toml"):
        return "".join(f"{_key(k)} = {_toml(v)}\n" for k, v in content.items()).encode()
    if path.endswith((".yaml", ".yml")):
        import yaml  # the import costs 30 ms, and two agents need it

        text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=False, width=2**31)
        return text.encode()
    raise ConfigError(f"{path!r} is given as a tree; its name must end in .json, .toml or .yaml")


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted.replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in cast("list[Any]", value)) + "]"
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in items) + "}"
    raise ConfigError(f"a TOML file cannot hold {value!r}")
