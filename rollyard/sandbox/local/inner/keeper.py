"""Keeps one program: starts it, moves its bytes, sees its end, and can end everything that came of it.

The keeper is a child of the supervisor and a subreaper: whatever the program forks, double-forks or setsids stays below
it, so killing the job finds all of it. The program writes to pipes made in here (so `/dev/stderr` reopens), the keeper
copies them into files that were opened on the host and that the program cannot reach. Those files have a cap; what comes
after it is read and dropped, so that a program never blocks on output nobody wants. The end is reported when the program
itself ends, not when the last holder of its stdout does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

from rollyard.sandbox.local.inner import gvisor, landlock, microvm, protocol, syscalls, tracer
from rollyard.sandbox.local.inner.path_view import PathView

_READ = 2**16
_AFTER_EXIT = 4 * 2**20  # what is still read once the program has ended while others hold its stdout
_KILL_ROUNDS = 200
# ignored by the zygote or by Python, and a program must not inherit that
_DEFAULTED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
Launch = dict[str, Any]


def descendants(root: int) -> list[int]:
    """Every process below `root`, by the kernel's own lists; none where there is no /proc."""
    found: list[int] = []
    todo = [root]
    while todo:
        pid = todo.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    children = [int(word) for word in file.read().split()]
            except OSError:
                continue
            found += children
            todo += children
    return found


def kill_below(root: int, reap: Callable[[], bool], session: int = 0) -> None:
    """Stop, then kill, everything below `root`. `reap` collects the dead and says whether any child is left. Without /proc
    only the process group that `session` leads can be found, and what becomes an orphan of it."""
    if session and not os.path.exists("/proc/self"):
        with contextlib.suppress(OSError):
            os.killpg(session, signal.SIGKILL)
    stopped: set[int] = set()
    for _ in range(_KILL_ROUNDS):  # a stopped process forks no more, so the set closes
        fresh = set(descendants(root)) - stopped
        if not fresh:
            break
        for pid in fresh:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= fresh
    for round_ in range(_KILL_ROUNDS):
        for pid in descendants(root):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not reap() or (session and round_ > 20 and not os.path.exists("/proc/self")):
            return
        time.sleep(0.001 * min(round_ + 1, 20))


class _Output:
    """One pipe on its way into one host file."""

    def __init__(self, pipe: int, file: int, cap: int) -> None:
        self.pipe, self.file, self.cap = pipe, file, cap
        self.at = 0
        self.truncated = False
        self.open = True
        os.set_blocking(pipe, False)

    def pump(self) -> int:
        """Move what is there now, at most `_READ` bytes; 0 when there was nothing."""
        try:
            data = os.read(self.pipe, _READ)
        except BlockingIOError:
            return 0
        if not data:
            self.open = False
            return 0
        kept = memoryview(data)[: max(0, self.cap - self.at)]
        self.truncated |= len(kept) < len(data)
        while kept:
            try:
                count = os.pwrite(self.file, kept, self.at)
            except OSError:  # the host's disk is full: the program's bytes are dropped, and that is said
                self.truncated, self.cap = True, self.at
                break
            self.at += count
            kept = kept[count:]
        return len(data)


def serve(control: socket.socket, confine: int | None, view: PathView | None) -> NoReturn:
    """A keeper's life: wait for a program, keep it and all that came of it to the end, be ready for the next. `confine` are
    Landlock rules that programs are put under, but not the keeper; `view` is the root that they are shown."""
    kept = {control.fileno()} if confine is None else {control.fileno(), confine}
    syscalls.close_all_but(kept)
    wake, woken = protocol.wake_on_children()
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    os.umask(0o022)
    while True:
        control.setblocking(True)
        got = protocol.receive(control)
        if got is None:
            os._exit(0)
        if "argv" not in got[0]:
            continue  # a word about the program before this one, which has ended
        control.setblocking(False)
        if not Keeper(*got, control, confine, view).run(wake):
            os._exit(0)
        os.chdir("/")
        syscalls.close_all_but({*kept, wake, woken})
        protocol.send(control, {"idle": True})


class Keeper:
    """One program. `fds` are the host's files for its output, then the source of its stdin, if it has one."""

    def __init__(
        self, launch: Launch, fds: list[int], control: socket.socket, confine: int | None, view: PathView | None
    ) -> None:
        self._launch = launch
        self._confine, self._view = confine, view
        self._fds = fds
        self._control = control
        self._began = time.monotonic()
        self._main = 0
        self._status: int | None = None
        self._timed_out = False
        self._reported = False

    def run(self, wake: int) -> bool:
        """Start the program and stay until nothing of it is left; False when the supervisor is gone."""
        try:
            outputs, feed = self._spawn()
        except OSError as error:
            where = error.filename
            if isinstance(where, bytes):
                where = os.fsdecode(where)
            name = errno.errorcode.get(error.errno or 0, "EIO")
            self._send({"error": name, "path": where or self._launch["argv"][0]})
            return True
        if not self._launch["wait"]:
            self._send({"pid": self._main})
        return self._loop(wake, outputs, feed)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone, and so is this process in a moment
            protocol.send(self._control, message)

    def _spawn(self) -> tuple[list[_Output], tuple[int, int] | None]:
        launch, uid, gid = self._launch, self._launch["uid"], self._launch["gid"]
        cwd: str = launch["cwd"]
        os.chdir(cwd if self._view is None else self._view.outside(os.fsencode(cwd)))
        pipes = [os.pipe(), os.pipe()]
        feed = None
        out, err, *source = self._fds
        if source:
            stdin, feeder = os.pipe()
            os.set_blocking(feeder, False)
            os.set_blocking(source[0], False)
            feed = (source[0], feeder)
        else:
            stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        if uid:
            for fd in (stdin, pipes[0][1], pipes[1][1]):
                with contextlib.suppress(OSError):  # /dev/null belongs to nobody here and needs no owner
                    os.fchown(fd, uid, gid)
        stdio = (stdin, pipes[0][1], pipes[1][1])
        if launch["microvm"]:
            self._main = microvm.spawn(launch, stdio)
        else:
            program = gvisor.wrap(launch) if launch["gvisor"] else launch
            self._main = spawn(program, stdio, self._confine, self._view)
        for fd in (stdin, pipes[0][1], pipes[1][1]):
            os.close(fd)
        cap = launch["max_output"]
        return [_Output(pipes[0][0], out, cap), _Output(pipes[1][0], err, cap)], feed

    def _loop(self, wake: int, outputs: list[_Output], feed: tuple[int, int] | None) -> bool:
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        poller.register(self._control, select.POLLIN)
        for output in outputs:
            poller.register(output.pipe, select.POLLIN)
        feeder = _Feeder(*feed, poller) if feed else None
        limit = self._launch.get("timeout")
        deadline = self._began + limit if limit is not None else None
        while True:
            wait = None if deadline is None or self._reported else max(0.0, deadline - time.monotonic()) * 1000 + 1
            ready = {fd for fd, _ in poller.poll(wait)}
            for output in outputs:
                if output.pipe in ready:
                    output.pump()
                    if not output.open:
                        poller.unregister(output.pipe)
            if feeder is not None and feeder.turn(ready):
                feeder = None
            if self._control.fileno() in ready and not self._command():
                return False
            if deadline is not None and self._status is None and time.monotonic() >= deadline:
                self._timed_out = True
                self._end()
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            more = self._reap()
            if self._status is not None and not self._reported:
                self._report(outputs)
            if self._reported and not more:
                return True

    def _command(self) -> bool:
        """A word from the supervisor; False when it is gone."""
        try:
            got = protocol.receive(self._control)
        except OSError:
            got = None
        if got is None:
            self._end()
            return False
        if got[0].get("op") == "kill":
            self._end()
        return True

    def _end(self) -> None:
        if self._launch["microvm"]:
            microvm.end(lambda: descendants(os.getpid()), self._reap)
        kill_below(os.getpid(), self._reap, self._main)

    def _reap(self) -> bool:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._main:
                self._status = status

    def _report(self, outputs: list[_Output]) -> None:
        for output in outputs:
            budget = _AFTER_EXIT
            while output.open and budget > 0 and (moved := output.pump()):
                budget -= moved
        status = self._status or 0
        self._reported = True
        if self._launch["ephemeral"]:  # the caller has all it will read
            for output in outputs:
                output.cap = 0
        self._send(
            {
                "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) and not self._timed_out else None,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                "timed_out": self._timed_out,
                "oom": bool(self._launch["microvm"]) and microvm.ran_out_of_memory(self._main),
                "truncated": any(output.truncated for output in outputs),
                "duration_s": time.monotonic() - self._began,
            }
        )


class _Feeder:
    """Moves bytes from the host's side into the program's stdin, and closes it at their end."""

    def __init__(self, source: int, target: int, poller: select.poll) -> None:
        self._source, self._target, self._poller = source, target, poller
        self._data = memoryview(b"")
        poller.register(source, select.POLLIN)

    def turn(self, ready: set[int]) -> bool:
        """Move what can be moved; True once stdin is closed."""
        try:
            if not self._data and self._source in ready:
                self._data = memoryview(os.read(self._source, _READ))
                if not self._data:
                    return self._close()
                self._poller.unregister(self._source)
                self._poller.register(self._target, select.POLLOUT)
            if self._data:
                self._data = self._data[os.write(self._target, self._data) :]
                if not self._data:
                    self._poller.unregister(self._target)
                    self._poller.register(self._source, select.POLLIN)
        except BlockingIOError:
            return False
        except OSError:  # the program closed its stdin
            return self._close()
        return False

    def _close(self) -> bool:
        for fd in (self._source, self._target):
            with contextlib.suppress(KeyError):
                self._poller.unregister(fd)
            os.close(fd)
        return True


def spawn(launch: Launch, stdio: tuple[int, int, int], confine: int | None, view: PathView | None) -> int:
    """Start the program in a session of its own. Raises OSError as exec does."""
    argv, env = launch["argv"], launch["env"]
    search = env.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":")
    candidates = [argv[0]] if "/" in argv[0] else [f"{part or '.'}/{argv[0]}" for part in search]
    if launch["uid"] or launch["gid"] or confine is not None or view is not None:
        return _spawn_as(launch, candidates, stdio, confine, view)
    last: OSError = FileNotFoundError(errno.ENOENT, "not found", argv[0])
    for path in candidates:
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(stdio)]
        try:
            return os.posix_spawn(path, argv, env, file_actions=actions, setsid=True, setsigdef=_DEFAULTED)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            last = error
    last.filename = argv[0]
    raise last


def _spawn_as(
    launch: Launch, candidates: list[str], stdio: tuple[int, int, int], confine: int | None, view: PathView | None
) -> int:
    """As another user or under rules: that needs a fork of our own, and the errno of a failed exec comes back by a pipe."""
    failed_r, failed_w = os.pipe()
    pid = os.fork()
    if pid:
        os.close(failed_w)
        raw = os.read(failed_r, 16)
        os.close(failed_r)
        if raw:
            os.waitpid(pid, 0)
            raise OSError(int(raw), os.strerror(int(raw)), launch["argv"][0])
        return pid
    number = errno.ENOENT
    try:
        os.setsid()
        for target, fd in enumerate(stdio):
            os.dup2(fd, target)
        if launch["uid"] or launch["gid"]:
            os.setgroups(launch["groups"])
            os.setresgid(launch["gid"], launch["gid"], launch["gid"])
            os.setresuid(launch["uid"], launch["uid"], launch["uid"])
        if confine is not None:
            landlock.restrict(confine)
        if view is not None:
            syscalls.close_all_but({failed_w})
            tracer.enter(view)
        for kind in _DEFAULTED:
            signal.signal(kind, signal.SIG_DFL)
        for path in candidates:
            try:
                os.execve(path, launch["argv"], launch["env"])  # noqa: S606 - a shell is what it must not be
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PermissionError as error:
                number = error.errno or number
    except OSError as error:
        number = error.errno or number
    os.write(failed_w, str(number).encode())
    os._exit(127)
