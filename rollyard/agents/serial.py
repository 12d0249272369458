"""Trees to bytes, in the format that a path's suffix names: JSON, TOML or YAML."""

from __future__ import annotations

import json
from typing import Any

from rollyard.core import toml
from rollyard.core.errors import ConfigError


def dump(path: str, content: Any) -> bytes:
    """Text and bytes are written as they are; a tree as `path`'s suffix says."""
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    if path.endswith(".json"):
        return json.dumps(content, indent=1, ensure_ascii=True).encode()
    if path.endswith(".toml"):
        try:
            return toml.dumps(content).encode()
        except TypeError as error:
            raise ConfigError(f"{path}: {error}") from error
    if path.endswith((".yaml", ".yml")):
        import yaml  # the import costs 30 ms, and two agents need it

        text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=False, width=2**31)
        return text.encode()
    raise ConfigError(f"{path!r} is given as a tree; its name must end in .json, .toml or .yaml")
