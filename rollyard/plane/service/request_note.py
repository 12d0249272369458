"""What is known about the request that is being answered, whichever API it came through: for the log, the history of instances
and the spans. It is noted where it is found out, in `Access` and `Instances`, and so is the same for every API."""

from __future__ import annotations

from contextvars import ContextVar

from rollyard.core.plane import ApiKey, Instance


class RequestNote:
    def __init__(self, api: str, trace_id: str) -> None:
        self.api, self.trace_id = api, trace_id
        self.caller: ApiKey | None = None
        self.instance: Instance | None = None
        self.charged = False  # it has counted for its owner's rate


CURRENT: ContextVar[RequestNote | None] = ContextVar("rollyard.plane.request", default=None)


def note_caller(caller: ApiKey) -> None:
    if (note := CURRENT.get()) is not None:
        note.caller = caller


def note_instance(instance: Instance) -> None:
    if (note := CURRENT.get()) is not None:
        note.instance = instance


def note_creation() -> None:
    """It counts for the rate of creations, and for no other."""
    if (note := CURRENT.get()) is not None:
        note.charged = True


def say_origin() -> str | None:
    """Who asks and how, as a history shows it; None without an outside caller, such as the sweep."""
    note = CURRENT.get()
    if note is None:
        return None
    return f"through the {note.api} API" + (f" by {note.caller.id}" if note.caller is not None else "")
