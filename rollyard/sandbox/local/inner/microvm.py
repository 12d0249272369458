"""A virtual machine inside the sandbox: `qemu` runs it, `virtiofsd` shows it the sandbox's root, and programs run in it alone.

What the sandbox is stays as it is: its files, limits and lifetime are those of its namespaces, in which these two processes
are all that there is. The machine has no network device: its programs' bytes, and the connections they make to ports that
the host listens at, go over a serial port (`streams.py`), whose end here is a process of its own, the courier. Keepers and the
supervisor talk to it through a socket; each connection is one conversation with the guest (`guest.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rollyard.sandbox.local.inner import guest, protocol, syscalls
from rollyard.sandbox.local.inner.streams import Message, Streams

PLACE = "/dev/microvm"  # a root of its own for the two programs: the host's /usr, and the sandbox's root in `share`
KERNEL, IMAGE = f"{PLACE}/kernel", f"{PLACE}/image"
_COURIER = f"{PLACE}/run/courier"
_LOG, _CONSOLE = f"{PLACE}/run/log", f"{PLACE}/run/console"
_OOM = f"{PLACE}/run/oom-"
_OWN = ("/dev", "/proc", "/sys")  # the guest has its own
_TAIL = 600
Launch = dict[str, Any]


class Microvm:
    """`pids` are its processes, which outlive every program; `link` ends with the machine."""

    def __init__(self, pids: set[int], link: socket.socket) -> None:
        self.pids, self.link = pids, link

    def ask(self, message: Message, fds: Sequence[int] = (), timeout: float = 20.0) -> Message:
        """One question and its answer. Raises OSError as the guest's own system call did."""
        with connect() as sock:
            sock.settimeout(timeout)
            protocol.send(sock, message, fds)
            return _answer(sock, "the virtual machine")


def boot(plan: dict[str, Any], control: socket.socket) -> Microvm:
    """Start it and wait until it answers. A failure says what the machine or `qemu` said last."""
    settings: dict[str, Any] = plan["microvm"]
    os.makedirs(f"{PLACE}/run", mode=0o700)
    for name, target in settings["links"].items():
        os.symlink(target, f"{PLACE}/{name}")
    _bind_devices()
    _mount_share()
    ours, theirs = socket.socketpair()
    link, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        theirs,
        far,
        socket.socket(socket.AF_UNIX) as served,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door,
    ):
        for sock, path in ((served, f"{PLACE}/run/files"), (door, _COURIER)):
            sock.bind(path)
            sock.listen(1024)
        pids = {_fork(lambda: _serve_files(settings, served.fileno()), {served.fileno()})}
        pids.add(_fork(lambda: _run_machine(settings, theirs.fileno()), {theirs.fileno()}))
        kept = {ours.fileno(), door.fileno(), far.fileno()}
        pids.add(_fork(lambda: PortBridge(ours.fileno(), door, far).serve(), kept))
    ours.close()
    _wait_until_ready(link, control, settings["boot_s"])
    return Microvm(pids, link)


def _wait_until_ready(link: socket.socket, control: socket.socket, timeout: float) -> None:
    poller = select.poll()
    poller.register(link, select.POLLIN)
    poller.register(control, select.POLLHUP)
    ready = {fd for fd, _ in poller.poll(timeout * 1000)}
    if control.fileno() in ready:  # the opener is gone
        os._exit(0)
    if link.fileno() in ready and protocol.receive(link) is not None:
        return
    said = " ".join(f"{_tail(_LOG)} {_tail(_CONSOLE)}".split())
    why = "ended" if ready else f"is not up after {timeout:.0f} s"
    raise OSError(errno.EIO, "", f"the virtual machine, which {why}: {said or 'it said nothing'}")


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read()[-_TAIL:].decode(errors="replace")
    except OSError:
        return ""


def _bind_devices() -> None:
    os.mkdir(f"{PLACE}/dev")
    for name in ("null", "urandom", "kvm"):
        if os.path.exists(f"/dev/{name}"):
            os.close(os.open(f"{PLACE}/dev/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
            syscalls.mount(f"/dev/{name}", f"{PLACE}/dev/{name}", None, syscalls.MS_BIND)
    os.mkdir(f"{PLACE}/proc")
    syscalls.mount("/proc", f"{PLACE}/proc", None, syscalls.MS_BIND)


def _mount_share() -> None:
    """The sandbox's root and what is mounted in it, without what every machine has of its own: nothing of this side's
    processes and devices can be reached through it."""
    with open("/proc/self/mountinfo", "rb") as file:
        points = [os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in file]
    os.mkdir(f"{PLACE}/share")
    for place in _OWN:
        os.makedirs(place, exist_ok=True)
    for point in sorted(set(points)):
        if not any(f"{point}/".startswith(f"{own}/") for own in _OWN):
            syscalls.mount(point, f"{PLACE}/share{point}".rstrip("/"), None, syscalls.MS_BIND)


def _fork(become: Callable[[], object], keep: set[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        syscalls.close_all_but(keep)
        become()
    finally:
        os._exit(70)


def _execute(argv: list[str], handed: int) -> NoReturn:
    os.set_inheritable(handed, True)
    log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.chroot(PLACE)
    os.chdir("/")
    for kind in (signal.SIGPIPE, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(kind, signal.SIG_DFL)
    os.execve(argv[0], argv, {"PATH": "/usr/bin", "TMPDIR": "/run"})  # noqa: S606 - programs of the host, by their paths


def _serve_files(settings: dict[str, Any], listening: int) -> NoReturn:
    options = (
        "source=/share,sandbox=chroot,cache=always,timeout=0,announce_submounts,xattr,no_killpriv_v2,modcaps=-mknod"
    )
    _execute([settings["virtiofsd"], "-f", f"--fd={listening}", "--rlimit-nofile=0", "-o", options], listening)


def _run_machine(settings: dict[str, Any], port: int) -> NoReturn:
    size = f"{settings['memory_mb']}M"
    words = [
        "console=ttyS0",
        "quiet",
        "panic=-1",
        "random.trust_cpu=on",
        "mitigations=off",
        "apparmor=0",
        "nokaslr",
        "rcupdate.rcu_expedited=1",
        f"rollyard.pids={settings['pids']}",
    ]
    argv = [
        settings["qemu"], "-M", "microvm,rtc=on,memory-backend=memory",
        "-no-user-config", "-nodefaults", "-nographic", "-no-reboot", "-global", "virtio-mmio.force-legacy=false",
        "-accel", settings["accelerator"], "-cpu", "max", "-smp", str(settings["cpus"]), "-m", size,
        "-object", f"memory-backend-memfd,id=memory,size={size},share=on",
        "-chardev", "socket,id=files,path=/run/files", "-device", f"vhost-user-fs-device,chardev=files,tag={guest.TAG}",
        "-device", "virtio-serial-device", "-chardev", f"socket,id=port,fd={port}",
        "-device", "virtserialport,chardev=port,name=rollyard",
        "-kernel", "/kernel", "-initrd", "/image", "-append", " ".join([*words, *settings["words"]]),
        "-serial", "file:/run/console",
    ]  # fmt: skip
    _execute(argv, port)


# -- the courier


class PortBridge:
    """Carries between the guest's port and the clients of `door`. `link` is told once that the guest is ready."""

    def __init__(self, port: int, door: socket.socket, link: socket.socket) -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self._link = link
        self._streams = Streams(port, self._receive, lambda: os._exit(0))
        self._clients: dict[int, socket.socket] = {}
        self._programs: set[int] = set()
        self._held: dict[int, list[Message | None]] = {}  # words that wait for a program's output to be written
        self._next = 4
        door.setblocking(False)
        self._streams.watch(door.fileno(), select.POLLIN, lambda _: self._accept(door))

    def serve(self) -> NoReturn:
        self._streams.serve()

    def _accept(self, door: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = door.accept()
            sock.setblocking(False)
            number, self._next = self._next, self._next + 4
            self._clients[number] = sock
            self._streams.watch(sock.fileno(), select.POLLIN, lambda _: self._client_ready(number, sock))

    def _client_ready(self, number: int, sock: socket.socket) -> None:
        try:
            got = protocol.receive(sock)
        except BlockingIOError:
            return
        except OSError:
            got = None
        if got is None:
            self._close(number)
            self._streams.end(number)
            return
        message, fds = got
        self._streams.tell(number, message)
        if "run" in message:
            stdin, out, err = fds
            self._programs.add(number)
            self._streams.carry(number + 1, source=stdin)
            for offset, sink in ((2, out), (3, err)):
                self._streams.carry(number + offset, sink=sink).flushed = lambda: self._release(number)
        elif "dial" in message:
            self._streams.carry(number + 1, source=fds[0], sink=os.dup(fds[0]))

    def _close(self, number: int) -> None:
        sock = self._clients.pop(number, None)
        self._held.pop(number, None)
        if sock is not None:
            self._streams.watch(sock.fileno(), 0, lambda _: None)
            sock.close()
        if number in self._programs:
            self._programs.remove(number)
            for offset in (1, 2, 3):
                self._streams.drop(number + offset)

    def _receive(self, number: int, message: Message | None) -> None:
        if message is not None and "ready" in message:
            protocol.send(self._link, message)
        elif message is not None and "connect" in message:
            self._connect(number, *message["connect"])
        elif number in self._clients:
            self._held.setdefault(number, []).append(message)
            self._release(number)

    def _release(self, number: int) -> None:
        """What a program's end is told by comes after all that it wrote."""
        if not all(self._streams.drained(number + offset) for offset in (2, 3)):
            return
        for message in self._held.pop(number, []):
            sock = self._clients.get(number)
            if sock is None:
                return
            if message is None:
                self._close(number)
                return
            if "error" in message:
                self._streams.drop(number + 1)
            with contextlib.suppress(OSError):  # it is gone; its end is heard next
                protocol.send(sock, message)

    def _connect(self, number: int, address: str, port: int) -> None:
        """A connection that a program made inside, made again here, to the host's listener."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(BlockingIOError, OSError):  # one that is refused is read as closed
            sock.connect((address, port))
        fd = sock.detach()
        self._streams.carry(number, source=fd, sink=os.dup(fd))


# -- for keepers and the supervisor


def connect() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(_COURIER)
    return sock


def _answer(sock: socket.socket, what: str) -> Message:
    got = protocol.receive(sock)
    if got is None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), what)
    if "error" in got[0]:
        number = int(got[0]["error"])
        raise OSError(number, os.strerror(number), got[0]["path"] or what)
    return got[0]


def spawn(launch: Launch, stdio: tuple[int, int, int]) -> int:
    """Start a program in the guest. The process whose number is returned ends as it does; another, which the keeper inherits,
    stays until nothing of the program is left, and ends all of it when it is asked to or is killed."""
    fields = {name: launch[name] for name in ("argv", "env", "cwd", "uid", "gid", "groups")}
    sock = connect()
    try:
        protocol.send(sock, {"run": fields}, stdio)
        _answer(sock, launch["argv"][0])
        return _fork(lambda: _stand_in(sock), {sock.fileno()})
    finally:
        sock.close()


def _stand_in(sock: socket.socket) -> NoReturn:
    heard, told = os.pipe2(os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _fork(lambda: _wait_for_end(sock, told), {sock.fileno(), told})
    sock.close()
    os.close(told)
    kind, _, number = os.read(heard, 64).partition(b" ")
    if kind == b"exit":
        os._exit(int(number))
    with contextlib.suppress(OSError):  # of a signal that cannot be ignored
        signal.signal(int(number or signal.SIGKILL), signal.SIG_DFL)
    os.kill(os.getpid(), int(number or signal.SIGKILL))
    os._exit(70)


def _wait_for_end(sock: socket.socket, told: int) -> NoReturn:
    def ask(_number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):
            protocol.send(sock, {"kill": True})

    signal.signal(signal.SIGTERM, ask)
    while (got := protocol.receive(sock)) is not None:
        message = got[0]
        code, number = message.get("exit_code"), message.get("signal")
        if message.get("oom"):
            os.close(os.open(f"{_OOM}{os.getppid()}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with contextlib.suppress(OSError):
            os.write(told, f"exit {code}".encode() if code is not None else f"signal {number}".encode())
    os._exit(0)


def ran_out_of_memory(pid: int) -> bool:
    """Whether the guest ended the program, or something that came of it, because its memory was used up; told once."""
    try:
        os.unlink(f"{_OOM}{pid}")
    except OSError:
        return False
    return True


def end(children: Callable[[], list[int]], reap: Callable[[], bool], timeout: float = 5.0) -> None:
    """Ask the guest to end a program and all that came of it, and wait until it has."""
    for pid in children():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while reap() and time.monotonic() < deadline:
        time.sleep(0.002)
