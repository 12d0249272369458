"""Policies by name, as the command line writes them: `upstream:URL`, `scripted:FILE`, `tokens:URL`, `replay:ID`, `queue`.

Names come from the entry points of group `rollyard.policies`: a factory that takes what stands after the colon.
"""

from __future__ import annotations

from typing import Any

from rollyard.core import registry
from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Policy

GROUP = "rollyard.policies"


def parse(text: str, **settings: Any) -> Policy:
    """`settings` go to the factory (`model=`, `key_env=` ...); None among them counts as not given."""
    name, colon, argument = text.partition(":")
    if not name:
        raise ConfigError(f"not a policy: {text!r}", hint=f"known: {', '.join(registry.names(GROUP))}")
    make = registry.load(GROUP, name)
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        return make(argument, **given) if colon else make(**given)
    except TypeError as error:
        raise ConfigError(f"the policy {name!r} cannot be made from {text!r}: {error}") from error
