"""The first process of a virtual machine: makes the sandbox's root out of what the host shares, and runs its programs.

It comes with the interpreter in the machine's first file system (`local/guest_image.py`), which it leaves; like the
supervisor it holds nothing worth reading. All it hears comes over one serial port (`streams.py`), and so does all that its
programs say: there is no network device. Each program is in a cgroup of its own, so that ending it ends all that came of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import time
from typing import Any, NoReturn

from rollyard.sandbox.local.inner import protocol, shared_memory, syscalls
from rollyard.sandbox.local.inner.streams import Message, PortStream, Streams

MODULES = "/modules"
TAG = "root"
_ROOT, _GROUPS = "/sandbox", "/groups"
_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_AFTER_EXIT = 4 * 2**20  # what is still read once a program has ended while others hold its stdout
_DEFAULTED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
_PORT_S = 10.0


class _Running:
    """A program: its process, its cgroup, and the streams that have not yet said all it wrote before it ended."""

    def __init__(self, number: int, pid: int, group: int) -> None:
        self.number, self.pid, self.group = number, pid, group
        self.status: int | None = None
        self.outputs: dict[int, PortStream] = {}
        self.told = False


class Guest:
    def __init__(self, port: int, groups: int, last_capability: int) -> None:
        self._groups, self._last_capability = groups, last_capability
        self._streams = Streams(port, self._receive, power_off)
        self._running: dict[int, _Running] = {}
        self._ending: list[int] = []  # conversations that wait until no program is left
        self._listening: set[tuple[str, int]] = set()
        self._next = 2**31  # the host's numbers are below
        wake, _ = protocol.wake_on_children()
        self._wake = wake
        self._streams.watch(wake, select.POLLIN, self._reap)

    def serve(self) -> NoReturn:
        self._streams.tell(0, {"ready": True})
        self._streams.serve()

    # -- what the host says

    def _receive(self, number: int, message: Message | None) -> None:
        job = self._running.get(number)
        if message is None or "kill" in message:
            if job is not None:
                _kill(job.group)
                self._look(job)
            return
        try:
            if "run" in message:
                self._run(number, message["run"])
            elif "listen" in message:
                self._streams.tell(number, {"port": self._listen(*message["listen"])})
            elif "dial" in message:
                self._dial(number, message["dial"])
            elif "sync" in message:
                os.sync()
                self._streams.tell(number, {"synced": True})
            elif "end_all" in message:
                _kill(self._groups)
                self._ending.append(number)
                self._tell_if_all_ended()
        except OSError as error:
            self._streams.tell(number, {"error": error.errno or errno.EIO, "path": error.filename})

    # -- programs

    def _run(self, number: int, launch: dict[str, Any]) -> None:
        os.mkdir(str(number), dir_fd=self._groups)
        group = os.open(str(number), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._groups)
        pipes = [os.pipe() for _ in range(3)]
        (stdin, feed), (out, stdout), (err, stderr) = pipes
        try:
            pid = _spawn(launch, (stdin, stdout, stderr), group, self._last_capability)
        except OSError:
            protocol.close_fds([feed, out, err, group])
            os.rmdir(str(number), dir_fd=self._groups)
            raise
        finally:
            protocol.close_fds([stdin, stdout, stderr])
        job = self._running[number] = _Running(number, pid, group)
        self._streams.tell(number, {"pid": pid})
        self._streams.carry(number + 1, sink=feed)
        for offset, source in ((2, out), (3, err)):
            job.outputs[offset] = self._streams.carry(number + offset, source=source)

    def _reap(self, _event: int = 0) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = found[1]
        for job in list(self._running.values()):
            if job.status is None and job.pid in ended:
                job.status = ended[job.pid]
                self._drain(job)
            self._look(job)

    def _tell_if_all_ended(self) -> None:
        if self._ending and not self._running:
            shared_memory.remove_shared_memory()
            for number in self._ending:
                self._streams.tell(number, {"ended": True})
            self._ending.clear()

    def _drain(self, job: _Running) -> None:
        """Its end is told once all that it wrote before is on its way."""
        for offset, stream in list(job.outputs.items()):

            def dry(offset: int = offset) -> None:
                del job.outputs[offset]
                self._tell_end(job)

            self._streams.drain(stream, _AFTER_EXIT, dry)

    def _tell_end(self, job: _Running) -> None:
        if job.outputs or job.told or job.status is None:
            return
        job.told = True
        status = job.status
        self._streams.tell(
            job.number,
            {
                "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                "oom": _value(job.group, "memory.events", "oom_kill") > 0,
            },
        )
        self._look(job)

    def _look(self, job: _Running) -> None:
        """Forget a program once it has ended and nothing that came of it is left."""
        if job.number not in self._running or not job.told or _value(job.group, "cgroup.events", "populated"):
            return
        os.close(job.group)
        with contextlib.suppress(OSError):  # a zombie of it is still leaving; an empty group costs nothing
            os.rmdir(str(job.number), dir_fd=self._groups)
        for offset in (1, 2, 3):
            self._streams.drop(job.number + offset)
        del self._running[job.number]
        self._streams.end(job.number)
        self._tell_if_all_ended()

    # -- network

    def _listen(self, address: str, port: int) -> int:
        """Connections to a port that the host listens at; the host's end makes them to its own. A port stays listened at."""
        if (address, port) in self._listening:
            return port
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(1024)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise

        def ready(_event: int) -> None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._join(sock.accept()[0], address, port)

        self._streams.watch(sock.fileno(), select.POLLIN, ready)
        self._listening.add((address, port))
        return port

    def _join(self, sock: socket.socket, address: str, port: int) -> None:
        number, self._next = self._next, self._next + 1
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._streams.tell(number, {"connect": [address, port]})
        fd = sock.detach()
        self._streams.carry(number, source=fd, sink=os.dup(fd))

    def _dial(self, number: int, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._streams.tell(number, {"connected": True})
            self._streams.carry(number + 1, source=os.dup(sock.fileno()), sink=os.dup(sock.fileno()))


def _spawn(launch: dict[str, Any], stdio: tuple[int, int, int], group: int, last_capability: int) -> int:
    failed_r, failed_w = os.pipe()
    pid = os.fork()
    if pid:
        os.close(failed_w)
        with os.fdopen(failed_r, "rb") as failed:
            raw = failed.read()
        if raw:
            os.waitpid(pid, 0)
            number, _, path = raw.decode("utf-8", "surrogateescape").partition(" ")
            raise OSError(int(number), os.strerror(int(number)), path)
        return pid
    try:
        _become_program(launch, stdio, group, last_capability)
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else launch["argv"][0]
        os.write(failed_w, f"{error.errno} {where}".encode("utf-8", "surrogateescape"))
    finally:
        os._exit(127)


def _become_program(launch: dict[str, Any], stdio: tuple[int, int, int], group: int, last_capability: int) -> NoReturn:
    _write(group, "cgroup.procs", "0")
    os.setsid()
    os.chdir(launch["cwd"])
    if launch["uid"]:
        for fd in stdio:
            os.fchown(fd, launch["uid"], launch["gid"])
    for target, fd in enumerate(stdio):
        os.dup2(fd, target)
    signal.set_wakeup_fd(-1)
    os.setgroups(launch["groups"])
    os.setresgid(launch["gid"], launch["gid"], launch["gid"])
    if launch["uid"] == 0:
        syscalls.set_capabilities(syscalls.KEPT_CAPABILITIES, last_capability)
    os.setresuid(launch["uid"], launch["uid"], launch["uid"])
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    for kind in (*_DEFAULTED, signal.SIGCHLD):
        signal.signal(kind, signal.SIG_DFL)
    argv, env = launch["argv"], launch["env"]
    search = env.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":")
    last: OSError = FileNotFoundError(errno.ENOENT, "not found", argv[0])
    for path in [argv[0]] if "/" in argv[0] else [f"{part or '.'}/{argv[0]}" for part in search]:
        try:
            os.execve(path, argv, env)  # noqa: S606 - a shell is what it must not be
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            last = error
    raise OSError(last.errno, last.strerror, argv[0])


def _write(group: int, name: str, value: str) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=group)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _value(group: int, name: str, key: str) -> int:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=group)
    try:
        words = os.read(fd, 4096).split()
    finally:
        os.close(fd)
    return int(words[words.index(key.encode()) + 1]) if key.encode() in words else 0


def _kill(group: int) -> None:
    _write(group, "cgroup.kill", "1")


# -- from the kernel's first program to a root of our own


def power_off() -> NoReturn:
    """The host's end is gone, so nobody wants this machine any more."""
    os.sync()
    with contextlib.suppress(OSError), open("/proc/sysrq-trigger", "w") as trigger:
        trigger.write("o")
    os._exit(0)


def _load_modules() -> None:
    for name in sorted(os.listdir(MODULES)):
        syscalls.load_module(f"{MODULES}/{name}")


def _settings() -> dict[str, str]:
    with open("/proc/cmdline") as file:
        words = [word.partition("=") for word in file.read().split()]
    return {name.removeprefix("rollyard."): value for name, _, value in words if name.startswith("rollyard.")}


def _find_port() -> int:
    """The serial port appears a moment after its driver."""
    end = time.monotonic() + _PORT_S
    while time.monotonic() < end:
        for name in os.listdir("/dev"):
            if name.startswith("vport"):
                return os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
        time.sleep(0.001)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/dev/vport0p1")


def _make_groups(pids: str) -> int:
    os.mkdir(_GROUPS)
    syscalls.mount("groups", _GROUPS, "cgroup2")
    programs = f"{_GROUPS}/programs"
    os.mkdir(programs)
    for place in (_GROUPS, programs):
        with open(f"{place}/cgroup.subtree_control", "w") as file:
            file.write("+memory +pids" if place == _GROUPS else "+memory")
    with open(f"{programs}/pids.max", "w") as file:
        file.write(pids)
    return os.open(programs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _make_root() -> None:
    os.mkdir(_ROOT)
    syscalls.mount(TAG, _ROOT, "virtiofs")
    syscalls.mount("proc", f"{_ROOT}/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    dev = f"{_ROOT}/dev"
    syscalls.mount("dev", dev, "tmpfs", syscalls.MS_NOSUID, "mode=755")
    for name, (major, minor) in _NODES.items():
        os.mknod(f"{dev}/{name}", 0o020666, os.makedev(major, minor))
        os.chmod(f"{dev}/{name}", 0o666)  # noqa: S103 - what these nodes are
    for name, target in _LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    os.mkdir(f"{dev}/pts")
    options = "newinstance,ptmxmode=0666,mode=0620"
    syscalls.mount("devpts", f"{dev}/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, options)
    os.mkdir(f"{dev}/shm")
    os.chmod(f"{dev}/shm", 0o1777)  # noqa: S103 - what /dev/shm is
    os.chdir(_ROOT)
    syscalls.mount(".", "/", None, syscalls.MS_MOVE)
    os.chroot(".")
    os.chdir("/")


def main() -> NoReturn:
    """A failure here ends the first process, which the kernel says on the console, with the trace before it."""
    for kind, place in (("proc", "/proc"), ("devtmpfs", "/dev")):
        os.makedirs(place, exist_ok=True)
        syscalls.mount(kind, place, kind)
    console = os.open("/dev/ttyS0", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(console, fd)
    _load_modules()
    port = _find_port()
    settings = _settings()
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last_capability = int(file.read())
    groups = _make_groups(settings["pids"])
    _make_root()
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # as in the other sandboxes
    syscalls.bring_loopback_up()
    syscalls.sethostname("sandbox")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2**16, 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o022)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    Guest(port, groups, last_capability).serve()
