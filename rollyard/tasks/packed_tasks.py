"""Tasks of a large set, encoded in a file that has no name: in memory is only where each of them lies.

A task that would come back as another one, such as one with a function in it, stays as it is; so does one that no file takes.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import IO, overload

import msgspec

from rollyard.core.cache import cache_home
from rollyard.core.task import Task

FEWEST = 50  # fewer are kept as they are, and read without an index
_OBJECT = 2**64 - 1  # the place of a task that is not in the file; its length is its number

_decoder = msgspec.msgpack.Decoder(Task)


class PackedTasks(Sequence[Task]):
    """Each access decodes the task anew."""

    def __init__(self, file: IO[bytes], places: array[int], objects: Sequence[Task]) -> None:
        self._file, self._places, self._objects = file, places, objects

    def __len__(self) -> int:
        return len(self._places) // 2

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> PackedTasks: ...
    def __getitem__(self, index: int | slice) -> Task | PackedTasks:
        if isinstance(index, slice):
            return self.choose(range(len(self))[index])
        place = 2 * range(len(self))[index]
        start, length = self._places[place : place + 2]
        if start == _OBJECT:
            return self._objects[length]
        return _decoder.decode(os.pread(self._file.fileno(), length, start))

    def choose(self, positions: Iterable[int]) -> PackedTasks:
        """Nothing is copied but where they lie."""
        chosen = array("Q")
        for position in positions:
            chosen.extend(self._places[2 * position : 2 * position + 2])
        return PackedTasks(self._file, chosen, self._objects)

    def __reduce__(self) -> tuple[type, tuple[list[Task]]]:
        return tuple, (list(self),)


def choose_tasks(tasks: tuple[Task, ...] | PackedTasks, positions: Iterable[int]) -> tuple[Task, ...] | PackedTasks:
    """Those at these positions, in this order."""
    if isinstance(tasks, PackedTasks):
        return tasks.choose(positions)
    return tuple(tasks[position] for position in positions)


def pack_tasks(tasks: Iterable[Task]) -> tuple[Task, ...] | PackedTasks:
    """A few as they are, many in a file of their own below the cache."""
    waiting = iter(tasks)
    few = tuple(islice(waiting, FEWEST))
    if len(few) < FEWEST:
        return few
    try:
        home = cache_home()
        home.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=home)  # noqa: SIM115 - it lives as long as the tasks are wanted
    except OSError:  # nothing can be written there: they stay in memory
        return few + tuple(waiting)
    places, objects, end = array("Q"), list[Task](), 0
    for task in chain(few, waiting):
        data = _encode(task)
        if data is None or not _write(file, data, end):
            places.extend((_OBJECT, len(objects)))
            objects.append(task)
        else:
            places.extend((end, len(data)))
            end += len(data)
    return PackedTasks(file, places, objects)


def _write(file: IO[bytes], data: bytes, start: int) -> bool:
    """False where the disk is full."""
    try:
        return os.pwrite(file.fileno(), data, start) == len(data)
    except OSError:
        return False


def _encode(task: Task) -> bytes | None:
    """None where it would not come back as it is."""
    try:
        data = msgspec.msgpack.encode(task)
        return data if _decoder.decode(data) == task else None
    except (TypeError, ValueError, OverflowError, NotImplementedError):
        return None
