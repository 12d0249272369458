"""Policies by name, as the command line writes them: `upstream:URL`, `scripted:FILE`, `tokens:URL`, `replay:ID`, `queue`.

Names come from the entry points of group `rollyard.policies`: a factory that takes what stands after the colon. Its settings
may follow a `#`, which no server ever sees: `tokens:http://localhost:8000#renderer=models/qwen&max_tokens_cap=2048`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import msgspec

from rollyard.core import registry
from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Policy

GROUP = "rollyard.policies"


def parse(text: str, **settings: Any) -> Policy:
    """`settings` go to the factory (`model=`, `key_env=` ...) and win over those in the text; None counts as not given."""
    named, _, written = text.partition("#")
    name, colon, argument = named.partition(":")
    if not name:
        raise ConfigError(f"not a policy: {text!r}", hint=f"known: {', '.join(registry.names(GROUP))}")
    make = registry.load(GROUP, name)
    given = {**written_settings(written), **{key: value for key, value in settings.items() if value is not None}}
    try:
        return make(argument, **given) if colon else make(**given)
    except TypeError as error:
        raise ConfigError(f"the policy {name!r} cannot be made from {text!r}: {error}") from error


def written_settings(text: str) -> dict[str, Any]:
    """`a=1&b=word`: numbers, booleans and JSON as themselves, everything else as text."""
    found: dict[str, Any] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError as error:
        raise ConfigError(f"not settings of a policy: {text!r}", hint="write them as key=value&key=value") from error
    for key, value in pairs:
        try:
            found[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[key] = value
    return found
