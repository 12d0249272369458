"""`SessionJournal`: what is left of a session when its server is killed, in one file for each, written before the answer leaves.

Only environments that can be saved are kept. A restarted server finds the files and puts a session back when its client, or
its agent, comes again: the environment as it was after its last answered move, and those answers, so that a request sent
again does not run twice. A move that was cut by the kill runs from where the environment was before it. Keys are kept as
hashes. The files survive the death of the process; they are not flushed against the death of the machine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError


class KeptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: a value, or the code and words of a refusal."""

    value: Any = None
    code: str | None = None
    message: str = ""


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True):
    session: str
    lease: str  # SHA-256
    agent: str  # SHA-256
    lease_s: float
    deadline_s: float
    episode_id: str | None
    steps: int
    saved: Any
    answers: dict[str, KeptAnswer]


class SessionJournal:
    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"sessions cannot be kept in {folder}: {error.strerror}") from error
        self._folder = folder
        self._since = time.time()

    def keep(self, record: JournalRecord) -> None:
        path = self._path(record.session)
        partial = path.with_suffix(".part")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(record))
        partial.replace(path)

    def drop(self, session_id: str) -> None:
        self._path(session_id).unlink(missing_ok=True)

    def list_left(self) -> list[JournalRecord]:
        """Sessions of a server that is no more. Each has its whole lease again, from when this one came up."""
        found: list[JournalRecord] = []
        for path in sorted(self._folder.glob("es_*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=JournalRecord))
            except (OSError, msgspec.DecodeError):
                path.unlink(missing_ok=True)  # not ours to read: it is a lost episode
        return found

    def is_expired(self, record: JournalRecord) -> bool:
        return time.time() > self._since + record.lease_s

    def _path(self, session_id: str) -> Path:
        return self._folder / f"{session_id}.json"
