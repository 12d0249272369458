"""Shows programs a root of their own where there are no mount namespaces: they are traced, and the paths they name are changed.

A tracer is under the same Landlock rules as its program, lives until the last process of it has ended, and takes them with it
when it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
from typing import Any, NoReturn

from rollyard.sandbox.local.inner import seccomp, syscalls
from rollyard.sandbox.local.inner.path_view import PathView
from rollyard.sandbox.local.inner.traced_calls import TABLES

_TRACEME, _PEEKDATA, _POKEDATA = 0, 2, 5
_CONT, _SYSCALL, _SETOPTIONS, _GETREGSET, _SETREGSET = 7, 24, 0x4200, 0x4204, 0x4205
_PRSTATUS = 1
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x80 | 0x100000  # sysgood fork vfork clone exec seccomp exitkill
_EVENT_SECCOMP = 7
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_WALL = 0x40000000
_PAGE, _RED_ZONE, _MAX_PATH, _MAX_ARGV = 4096, 128, 4096, 2**16
_SCRIPTS = 4  # interpreters that are scripts themselves, as the kernel counts
_CLOSED_V4 = struct.pack("=HH4s8x", 2, 1 << 8, b"\x7f\0\0\1")
_CLOSED_V6 = struct.pack("=HHI16sI", 10, 1 << 8, 0, b"\0" * 15 + b"\1", 0)
_NOWHERE = struct.pack("=H", 1) + b"/nowhere\0"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
for _name in ("process_vm_readv", "process_vm_writev"):
    getattr(_libc, _name).restype = ctypes.c_ssize_t
    getattr(_libc, _name).argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip
_CALLS = TABLES[syscalls.MACHINE]


def enter(view: PathView) -> None:
    """Returns in a child, which has the view. This process ends as the child does. The child can be looked into by every program
    of the sandbox's, as its tracer has to: nothing may be open that is not for them."""
    signal.set_wakeup_fd(-1)  # its number may be that of a descriptor made from now on
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reading, writing = os.pipe()
    if os.fork():
        _step_back(reading)
        _stand_in(reading)
    os.close(reading)
    pid = os.fork()
    if pid:
        _step_back(writing)
        try:
            _Tracer(view, pid, writing).run()
        finally:
            os._exit(0)
    os.close(writing)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    _ptrace(_TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.trace_program(syscalls.MACHINE, _CALLS.numbers, _CALLS.from_cwd))


def works() -> bool:
    """Whether this process may trace its children and change what they ask for."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    try:
        enter(PathView("/usr", {}))
        os._exit(0 if os.path.isdir("/bin/.") and os.path.exists("/share") else 1)
    finally:
        os._exit(1)


def _step_back(kept: int) -> None:
    """Hold nothing of the program's but this descriptor, and leave signals that are meant for it to it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    syscalls.close_all_but({kept})
    for fd in {0, 1, 2} - {kept}:
        with contextlib.suppress(OSError):
            os.close(fd)


def _stand_in(reading: int) -> NoReturn:
    """Wait for the program's end and end in the same way."""
    told = os.read(reading, 16)
    status = int(told) if told else signal.SIGKILL
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _ptrace(request: int, pid: int, address: int = 0, data: Any = 0) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "ptrace")


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_BUFFER = ctypes.create_string_buffer(_PAGE)  # a tracer has one thread, and one process before it at a time
_HERE, _THERE = _Span(ctypes.addressof(_BUFFER), 0), _Span(0, 0)
_HERE_AT, _THERE_AT = ctypes.byref(_HERE), ctypes.byref(_THERE)


class _Memory:
    """The memory of one traced process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def read(self, address: int, length: int, *, until_end: bool = False) -> bytes:
        """Up to a page; with `until_end` perhaps no more than up to the end of the string."""
        length = min(length, _PAGE)
        count = self._move(_libc.process_vm_readv, address, length)
        return ctypes.string_at(_BUFFER, count) if count >= 0 else self._peek(address, length, until_end)

    def _peek(self, address: int, length: int, until_end: bool) -> bytes:
        """Word by word, where the calls for more are barred, as older profiles of container engines do."""
        at, found = address & ~7, b""
        while at < address + length and not (until_end and b"\0" in found[max(0, address - (address & ~7)) :]):
            ctypes.set_errno(0)
            word = _libc.ptrace(_PEEKDATA, self._pid, at, 0)
            if word == -1 and ctypes.get_errno():
                break
            found += struct.pack("=q", word)
            at += 8
        return found[address & 7 :][:length]

    def _poke(self, address: int, data: bytes) -> bool:
        start = address & ~7
        whole = self._peek(start, address - start, False) + data
        tail = -len(whole) % 8
        whole += self._peek(start + len(whole), tail, False) if tail else b""
        words = struct.unpack(f"={len(whole) // 8}Q", whole)
        return all(_libc.ptrace(_POKEDATA, self._pid, start + 8 * n, word) == 0 for n, word in enumerate(words))

    def write(self, address: int, data: bytes) -> bool:
        for at in range(0, len(data), _PAGE):
            part = data[at : at + _PAGE]
            ctypes.memmove(_BUFFER, part, len(part))
            count = self._move(_libc.process_vm_writev, address + at, len(part))
            if count != len(part) and not (count < 0 and self._poke(address + at, part)):
                return False
        return True

    def _move(self, call: Any, address: int, length: int) -> int:
        _HERE.length = _THERE.length = length
        _THERE.base = address
        return call(self._pid, _HERE_AT, 1, _THERE_AT, 1, 0)

    def text(self, address: int) -> bytes | None:
        """The string there; None for one that has no end, or is not there."""
        found = b""
        while len(found) <= _MAX_PATH:
            part = self.read(address + len(found), _PAGE - (address + len(found)) % _PAGE, until_end=True)
            if not part:
                return None
            end = part.find(b"\0")
            if end >= 0:
                return found + part[:end]
            found += part
        return None


_REGISTERS = (ctypes.c_uint64 * _CALLS.registers)()
_REGISTERS_SPAN = _Span(ctypes.addressof(_REGISTERS), ctypes.sizeof(_REGISTERS))
_REGISTERS_AT = ctypes.byref(_REGISTERS_SPAN)


class _Stop:
    """One process that stands before a system call. What is written for it goes below its stack."""

    def __init__(self, pid: int) -> None:
        self.pid, self.memory, self.changed = pid, _Memory(pid), False
        self._values = _REGISTERS
        _ptrace(_GETREGSET, pid, _PRSTATUS, _REGISTERS_AT)
        self._free = (self._values[_CALLS.stack] - _RED_ZONE) & ~15

    @property
    def number(self) -> int:
        return self._values[_CALLS.number]

    @property
    def result(self) -> int:
        return ctypes.c_int64(self._values[_CALLS.result]).value

    def argument(self, place: int) -> int:
        return self._values[_CALLS.arguments[place]]

    def give(self, place: int, value: int) -> None:
        self._values[_CALLS.arguments[place]] = value
        self.changed = True

    def answer(self, value: int) -> None:
        self._values[_CALLS.result] = value
        self.changed = True

    def put(self, data: bytes) -> int:
        """Where the process now has `data`; 0, a bad address, where there is no room."""
        self._free = (self._free - len(data)) & ~15
        return self._free if self.memory.write(self._free, data) else 0

    def save(self) -> None:
        if self.changed:
            _ptrace(_SETREGSET, self.pid, _PRSTATUS, _REGISTERS_AT)


class _Tracer:
    def __init__(self, view: PathView, main: int, report: int) -> None:
        self._view, self._main, self._report = view, main, report
        self._known = {main}
        self._awaited: dict[int, tuple[int, int, int]] = {}  # who stands in a call whose result is a path

    def run(self) -> None:
        os.waitpid(self._main, _WALL)
        _ptrace(_SETOPTIONS, self._main, 0, _OPTIONS)
        _ptrace(_CONT, self._main)
        while True:
            try:
                pid, status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                return
            if not os.WIFSTOPPED(status):
                self._forget(pid, status)
                continue
            with contextlib.suppress(ProcessLookupError):  # it was killed where it stood
                request, number = self._go_on(pid, status)
                _ptrace(request, pid, 0, number)

    def _forget(self, pid: int, status: int) -> None:
        self._known.discard(pid)
        self._awaited.pop(pid, None)
        if pid == self._main:
            with contextlib.suppress(OSError):  # nobody waits for it any more
                os.write(self._report, str(status).encode())

    def _go_on(self, pid: int, status: int) -> tuple[int, int]:
        """How the process is let go, and with which signal."""
        number, event = os.WSTOPSIG(status), status >> 16
        if event == _EVENT_SECCOMP:
            return (_SYSCALL if self._enter_call(pid) else _CONT), 0
        if number == _SYSCALL_STOP:
            self._leave_call(pid)
            return _CONT, 0
        if event:
            return _CONT, 0
        if number == signal.SIGSTOP and pid not in self._known:
            self._known.add(pid)  # a new one begins so
            return _CONT, 0
        return _CONT, number

    def _enter_call(self, pid: int) -> bool:
        """Change what is asked for; True when the answer has to be changed too."""
        stop = _Stop(pid)
        number = stop.number
        if number in _CALLS.execs:
            self._execute(stop, _CALLS.execs[number])
        elif number in _CALLS.sockets:
            self._address(stop, connects=number == _CALLS.connect and self._view.closed)
        else:
            if number in _CALLS.links:
                self._change_path(stop, _CALLS.links[number])
            for place in _CALLS.paths.get(number, ()):
                self._change_path(stop, place)
        if number in _CALLS.results:
            place = _CALLS.results[number]
            self._awaited[pid] = (number, stop.argument(place), stop.argument(place + 1))
        stop.save()
        return number in _CALLS.results

    def _change_path(self, stop: _Stop, place: int) -> None:
        address = stop.argument(place)
        path = stop.memory.text(address) if address else None
        if path is not None and (found := self._view.outside(path)) != path:
            stop.give(place, stop.put(found + b"\0"))

    def _leave_call(self, pid: int) -> None:
        """The path that the kernel found, as the sandbox calls it."""
        awaited = self._awaited.pop(pid, None)
        if awaited is None:
            return
        number, address, size = awaited
        stop = _Stop(pid)
        ended = _CALLS.results[number] == 0  # getcwd's has an end, a link's has none
        if stop.result <= 0:
            return
        path = stop.memory.read(address, stop.result)
        found = self._view.inside(path[:-1]) + b"\0" if ended else self._view.inside(path)
        if found != path and stop.memory.write(address, found[:size]):
            stop.answer(min(len(found), size))
            stop.save()

    def _address(self, stop: _Stop, *, connects: bool) -> None:
        """A socket by path is the sandbox's own. Connections beyond loopback go to a closed port."""
        data = stop.memory.read(stop.argument(1), min(stop.argument(2), 128))
        family = int.from_bytes(data[:2], "little") if len(data) >= 2 else -1
        fresh = data
        if family == 1 and data[2:3] not in (b"", b"\0"):
            path = self._view.outside(data[2:].split(b"\0", 1)[0])
            fresh = data[:2] + path + b"\0" if len(path) < 108 else _NOWHERE
        elif family == 2 and connects and data[4:5] not in (b"\x7f", b"\0"):
            fresh = _CLOSED_V4
        elif family == 10 and connects and not _is_loopback(data[8:24]):
            fresh = _CLOSED_V6
        if fresh != data:
            stop.give(1, stop.put(fresh))
            stop.give(2, len(fresh))

    def _execute(self, stop: _Stop, place: int) -> None:
        """A script of the sandbox's is started as its interpreter with the script's own name, as the kernel would do it."""
        path = stop.memory.text(stop.argument(place))
        if path is None:
            return
        before: list[bytes] = []
        name, found = path, self._view.outside(path)
        for _ in range(_SCRIPTS):
            line = _first_line(stop.pid, found)
            if line is None:
                break
            program, _, word = line.partition(b" ")
            if found == name and self._view.outside(program) == program:
                break  # the kernel does the rest
            before = [program, *([word.strip()] if word.strip() else []), name, *before[1:]]
            name, found = program, self._view.outside(program)
        if before and place == 0:
            self._change_argv(stop, before)
        if found != path:
            stop.give(place, stop.put(found + b"\0"))

    def _change_argv(self, stop: _Stop, before: list[bytes]) -> None:
        address, old = stop.argument(1), list[int]()
        while address and len(old) < _MAX_ARGV:
            raw = stop.memory.read(address, _PAGE - address % _PAGE) or b"\0" * 8
            values = struct.unpack(f"={len(raw) // 8}Q", raw[: len(raw) // 8 * 8])
            if 0 in values:
                old += values[: values.index(0)]
                break
            old += values
            address += len(values) * 8
        words = [stop.put(word + b"\0") for word in before]
        stop.give(1, stop.put(struct.pack(f"={len(words) + len(old[1:]) + 1}Q", *words, *old[1:], 0)))


def _is_loopback(address: bytes) -> bool:
    mapped = address[:12] == b"\0" * 10 + b"\xff\xff" and address[12:13] == b"\x7f"
    return mapped or address in (b"\0" * 16, b"\0" * 15 + b"\1")


def _first_line(pid: int, path: bytes) -> bytes | None:
    """What follows `#!` in a file that begins so."""
    where = path if path.startswith(b"/") else b"/proc/%d/cwd/%s" % (pid, path)
    try:
        fd = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        head = os.read(fd, 256)
    except OSError:
        return None
    finally:
        os.close(fd)
    if not head.startswith(b"#!"):
        return None
    return head[2:].split(b"\n", 1)[0].strip().replace(b"\t", b" ")
