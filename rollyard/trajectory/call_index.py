"""The calls of a trajectory, and what a later call needs to know of them."""

from __future__ import annotations

from rollyard.core.call import Call, CallRecord
from rollyard.core.message import Message


class Ledger:
    def __init__(self) -> None:
        self.records: dict[str, CallRecord] = {}  # in commit order
        self.at_prompt: dict[int, str] = {}  # prompt leaf -> the first call that was answered there
        self._failed: dict[bytes, str] = {}  # request body -> the call that failed with it
        self._threads: dict[str | None, str] = {}  # thread -> its latest answered call
        self._spawners: dict[str, str] = {}  # thread ("" for any) -> its latest call that asked for tools
        self._awaited: dict[bytes | str, list[str]] = {}  # an unrecorded answer -> the calls that quote it

    def note(self, record: CallRecord, answer: Message | None, orphan: Message | None) -> None:
        self.records[record.id] = record
        if answer is None:
            self._failed[record.raw_request or record.id.encode()] = record.id
            return
        self._failed.pop(record.raw_request, None)
        self._threads[record.thread] = record.id
        if record.prompt_leaf is not None:
            self.at_prompt.setdefault(record.prompt_leaf, record.id)
        if record.kind == "agent" and answer.tool_calls:
            self._spawners[record.thread or ""] = self._spawners[""] = record.id
        if orphan is not None:
            for name in _names(orphan):
                self._awaited.setdefault(name, []).append(record.id)

    def note_failure(self, body: bytes) -> str | None:
        return self._failed.get(body)

    def latest(self, thread: str | None) -> CallRecord | None:
        """A thread's latest answered call."""
        return self.records.get(self._threads.get(thread, ""))

    def spawner(self, call: Call) -> str | None:
        """The call whose tool calls most likely started this sub-agent; None once its thread is known."""
        if call.kind != "subagent" and call.parent_thread is None:
            return None
        if call.thread is not None and call.thread in self._threads:
            return None
        return self._spawners.get(call.parent_thread if call.parent_thread is not None else "")

    def take_waiting_for(self, answer: Message) -> list[CallRecord]:
        """Calls that quote this answer and came before it; each is handed out once."""
        if not self._awaited:
            return []
        found: dict[str, None] = {}
        for name in _names(answer):
            found.update(dict.fromkeys(self._awaited.pop(name, ())))
        return [self.records[call_id] for call_id in found]


def _names(answer: Message) -> list[bytes | str]:
    """The keys an answer is awaited under."""
    return [answer.digest, *(call.id for call in answer.tool_calls if call.id)]
