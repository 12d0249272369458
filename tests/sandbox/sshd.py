"""A real OpenSSH server on the loopback, on a port of its own, with keys of its own, and a client's configuration for it."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Server:
    """`config` is the client's; the machine is called `yard` in it."""

    def __init__(self, place: Path) -> None:
        self.config, self.known = place / "client", place / "known"
        self._live: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / name], check=True)
        shutil.copy(place / "user.pub", place / "allowed")
        self._settings = place / "server"
        self._settings.write_text(
            f"HostKey {place}/host\nAuthorizedKeysFile {place}/allowed\nStrictModes no\nPidFile none\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nUsePAM no\n"
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.known.write_text(f"[127.0.0.1]:{self.port} {(place / 'host.pub').read_text()}")
        self.config.write_text(
            f"Host yard\n HostName 127.0.0.1\n Port {self.port}\n User {getpass.getuser()}\n IdentityFile {place}/user\n"
            f" IdentitiesOnly yes\n UserKnownHostsFile {self.known}\n GlobalKnownHostsFile none\n"
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            argv = [SSHD, "-i", "-f", self._settings]
            process = subprocess.Popen(argv, stdin=connection, stdout=connection, stderr=subprocess.DEVNULL)
            self._live.append((connection, process))

    def cut(self) -> int:
        """End every connection at once, as a network does; how many there were."""
        live = [connection for connection, process in self._live if process.poll() is None]
        for connection in live:
            with contextlib.suppress(OSError):  # it ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        return len(live)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for connection, process in self._live:
            connection.close()
            process.wait(20)


@contextlib.contextmanager
def serving(place: Path):
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no OpenSSH server and client here")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the server wants it, and a package's own start makes it
    place.mkdir()
    place.chmod(0o755)
    server = Server(place)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def machine_folder():
    """A path for what the machine keeps, which its user can make and reach whoever that is; nothing is there afterwards."""
    place = Path(tempfile.mkdtemp(prefix="rollyard-machine-", dir="/var/tmp"))
    place.chmod(0o1777)
    try:
        yield str(place / "home")
    finally:
        while place.exists():
            with contextlib.suppress(FileNotFoundError):  # what still dies there removes files of its own
                shutil.rmtree(place)


@contextlib.contextmanager
def machine_options(name, place: Path):
    """Options of a backend that keeps its sandboxes on a machine: this one, by a server here for ssh."""
    with contextlib.ExitStack() as stack:
        options = {"folder": stack.enter_context(machine_folder()), "lease_s": 60.0}
        if name == "ssh":
            server = stack.enter_context(serving(place))
            options |= {"host": "yard", "config": str(server.config)}
        elif shutil.which(name) is None:
            pytest.skip(f"no {name} here")
        yield options
