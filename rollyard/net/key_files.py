"""Keys in files: made with a new key where there is no file, readable by their owner alone, never empty.

A mounted secret belongs to another user and is read through its group, so the group of such a file may read it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rollyard.core.errors import ConfigError
from rollyard.core.home import user_home
from rollyard.core.ids import secret


def read_or_make_key(path: Path, prefix: str = "ry") -> str:
    """The key in the file, which is made where it does not exist."""
    if path.exists():
        return read_key(path)
    key = secret(prefix)
    write_key(path, key)
    return key


def read_key(path: Path) -> str:
    """The key in a file that exists; a file that others can read, or that holds no key, is refused."""
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{path} is a directory, not a key file", hint="name a file")
        refused = 0o077 if found.st_uid == os.geteuid() else 0o027
        if found.st_mode & refused:
            raise ConfigError(f"others can read {path}", hint=f"chmod 600 {path}")
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the key file {path} cannot be read: {why}") from error
    if not key or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{path} holds no key", hint="one line of printable characters; remove the file for a new key"
        )
    return key


def write_key(path: Path, key: str) -> None:
    """Into a new file. The caller has seen that there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key + "\n")
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be made: {error.strerror}") from error


def state_file(name: str) -> Path:
    """Where a server keeps a key file that no option names."""
    root = Path(os.environ.get("XDG_STATE_HOME") or user_home() / ".local" / "state")
    return root / "rollyard" / name
