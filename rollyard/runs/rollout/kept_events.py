"""An agent's events, within bounds: an agent that prints without end costs the host no more memory than one that prints a lot.

The first events and the newest stay; what was between is counted. How many are told to the store is bounded as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollyard.core.events import AgentEvent

HEAD = 1_000
MAX_EVENTS = 20_000
MAX_BYTES = 64 * 2**20
MAX_TOLD = 50_000


class KeptEvents:
    def __init__(self) -> None:
        self._head: list[AgentEvent] = []
        self._tail: list[AgentEvent] = []
        self._bytes = 0
        self.dropped = 0
        self.told = 0

    def __iter__(self) -> Iterator[AgentEvent]:
        yield from self._head
        yield from self._tail

    def add(self, event: AgentEvent) -> None:
        if len(self._head) < HEAD and _size(event) * HEAD <= MAX_BYTES:
            self._head.append(event)
            return
        self._tail.append(event)
        self._bytes += _size(event)
        if len(self._tail) > 2 * MAX_EVENTS or self._bytes > 2 * MAX_BYTES:
            self._drop()

    def _drop(self) -> None:
        """Down to the newest, so that dropping costs little per event."""
        count, size = 0, 0
        for event in reversed(self._tail):
            size += _size(event)
            if count >= MAX_EVENTS or size > MAX_BYTES:
                break
            count += 1
        self.dropped += len(self._tail) - count
        self._tail = self._tail[len(self._tail) - count :]
        self._bytes = sum(_size(event) for event in self._tail)

    def may_tell(self) -> bool:
        """Whether one more event goes to the store."""
        self.told += 1
        return self.told <= MAX_TOLD


def _size(event: AgentEvent) -> int:
    return len(event.text) + sum(len(value) for value in event.fields.values() if isinstance(value, str))
