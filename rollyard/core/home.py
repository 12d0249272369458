"""Where what must last is kept on this machine (`data_home`); what can be fetched again is in `core.cache.cache_home`.

It is private to the user (0700): a sandbox's upper directory or an image may hold what other users must not read.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollyard.core.errors import ConfigError

STORE = "runs.db"  # where runs are kept unless something says otherwise
STORE_VARIABLE = "ROLLYARD_STORE"


def default_store() -> str:
    """Where a verb looks for runs that is not told."""
    return os.environ.get(STORE_VARIABLE) or STORE


def data_home() -> Path:
    """`$ROLLYARD_HOME`, else `$XDG_DATA_HOME/rollyard`, else `~/.local/share/rollyard`."""
    if chosen := os.environ.get("ROLLYARD_HOME"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else user_home() / ".local" / "share").absolute() / "rollyard"


def user_home() -> Path:
    """`$HOME`, else what the machine's list of users says. A container may run under a number that is in no list."""
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError(
            f"the user {os.getuid()} has no home directory", hint="set HOME to a folder that this user may write to"
        ) from None


def private_dir(path: Path) -> Path:
    """The directory, made with its parents when it was absent; only its owner may enter what was made."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path}: {error.strerror}",
            hint="set HOME, or ROLLYARD_HOME, to a folder that this user may write to",
        ) from error
    return path
