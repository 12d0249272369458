"""How a shell of a machine is started: here, or over SSH.

The OpenSSH client is used as it is installed, so keys, agents, jump hosts and names are those of the user's own configuration. It
never asks questions, and a host whose key is not known is refused. Programs share connections, a few on each: a server
bounds how many one connection carries. A connection lasts as long as a `cat` on its stdin, so none outlives this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec

from rollyard.core.errors import ConfigError, Error, SandboxInterrupted, SandboxUnavailable

# What stands in a command line is only this: the script comes as the first line of stdin. A root login becomes nobody first,
# since a root that is mapped into a sandbox would still be root for whatever is in no namespace.
READ = 'IFS= read -r l; s=$(printf %s "$l" | base64 -d)'
BOOT = (
    f"{READ}; [ $(id -u) = 0 ] && exec setpriv --reuid 65534 --regid 65534 --clear-groups /bin/sh -c "
    '"$s"; exec /bin/sh -c "$s"'
)
_QUIET = (
    "BatchMode=yes", "StrictHostKeyChecking=yes", "ClearAllForwardings=yes", "ForwardAgent=no", "ForwardX11=no", "LogLevel=ERROR",
    "PermitLocalCommand=no", "RemoteCommand=none", "RequestTTY=no", "ServerAliveInterval=15", "ServerAliveCountMax=3",
)  # fmt: skip
_CONNECT_S = 30.0
_SSH_FAILED = 255
_CANNOT = {
    "Host key verification failed": "log in once by hand with `ssh`, compare the key, and accept it",
    "IDENTIFICATION HAS CHANGED": "the machine has another key than before: find out why before you remove the old one",
    "Permission denied": "`ssh HOST true` has to work without a question: a key, an agent, or a line in ~/.ssh/config",
    "Could not resolve hostname": "is the name right, and known to ~/.ssh/config or to DNS?",
    "Bad configuration option": "see the file it names",
    "Can't open user config file": "config= names a file of the OpenSSH client",
}


class MachineShell(ABC):
    """One machine. `name` is what errors call it."""

    name: str

    @abstractmethod
    def one_shell(self) -> Sequence[str]:
        """The argv of a shell that reads its script from stdin, on a connection of its own."""

    @abstractmethod
    def session(self) -> contextlib.AbstractAsyncContextManager[Sequence[str]]:
        """The same on a shared connection, which is held meanwhile."""

    async def close(self) -> None:
        return

    def failure(self, code: int | None, said: bytes) -> Error | None:
        """Why the shell was not reached, where that is what an exit code means."""
        return None


class LocalShell(MachineShell):
    name = "this machine"

    def one_shell(self) -> Sequence[str]:
        return ["/bin/sh", "-c", BOOT]

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncGenerator[Sequence[str]]:
        yield self.one_shell()


class SharedConnection(msgspec.Struct, kw_only=True):
    """A connection that others go over; `control` is the client's socket."""

    control: str
    process: asyncio.subprocess.Process
    used: int = 0


class SSHShell(MachineShell):
    """`host` is a name of the user's configuration, or `user@host`; `config` is another configuration file; `sessions` is how
    many programs share a connection (a server's `MaxSessions` less one); `own_connections=False` leaves sharing to the
    configuration, for hosts that are logged in to by hand."""

    def __init__(self, host: str, *, config: str | None, sessions: int, own_connections: bool) -> None:
        if not host or host.startswith("-"):
            raise ConfigError(f"{host!r} is not the name of a machine", hint="give HOST or USER@HOST")
        self.name, self._host, self._sessions, self._own = host, host, sessions, own_connections
        self._options = [*(["-F", config] if config else []), "-T", *(word for one in _QUIET for word in ("-o", one))]
        self._shared: list[SharedConnection] = []
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()
        self._place: str | None = None

    def one_shell(self) -> Sequence[str]:
        alone = ["-o", "ControlPath=none"] if self._own else []
        return ["ssh", *self._options, *alone, self._host, f"exec /bin/sh -c '{BOOT}'"]

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncGenerator[Sequence[str]]:
        if not self._own:
            yield self.one_shell()
            return
        one = await self._take()
        try:
            shared = ["-o", f"ControlPath={one.control}", "-o", "ControlMaster=no"]
            yield ["ssh", *self._options, *shared, self._host, f"exec /bin/sh -c '{BOOT}'"]
        finally:
            one.used -= 1

    async def _take(self) -> SharedConnection:
        async with self._lock:  # one at a time: a server drops those that begin together
            self._shared = [one for one in self._shared if one.process.returncode is None]
            found = next((one for one in self._shared if one.used < self._sessions), None)
            if found is None:
                found = await self._connect()
                self._shared.append(found)
            found.used += 1
            return found

    async def _connect(self) -> SharedConnection:
        if self._place is None:
            self._place = tempfile.mkdtemp(prefix="rollyard-ssh-")  # short: a socket's path is bounded
        control = f"{self._place}/{next(self._numbers)}"
        argv = [
            "ssh",
            *self._options,
            "-o",
            f"ControlPath={control}",
            "-o",
            "ControlMaster=yes",
            "-o",
            "ControlPersist=no",
        ]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, self._host, "exec cat", stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(_CONNECT_S):
                process.stdin.write(b"up\n")
                said = await process.stdout.readline()
        except BaseException as error:  # cancelled too: a connection that is not up has no owner to close it
            await _end(process)
            if isinstance(error, TimeoutError):
                raise SandboxUnavailable(f"{self.name} did not answer in {_CONNECT_S:g} s") from None
            raise
        if not said.endswith(b"up\n"):
            _, why = await process.communicate()
            raise self.failure(process.returncode, why) or SandboxUnavailable(f"{self.name} runs no program over SSH")
        return SharedConnection(control=control, process=process)

    def failure(self, code: int | None, said: bytes) -> Error | None:
        if code != _SSH_FAILED:
            return None
        text = " ".join(said.decode("utf-8", "replace").split())[-300:]
        for sign, hint in _CANNOT.items():
            if sign in text:
                return ConfigError(f"{self.name} cannot be used over SSH: {text}", hint=hint)
        if "Connection refused" in text or "timed out" in text:
            return SandboxUnavailable(f"{self.name} is not reached over SSH: {text}")
        return SandboxInterrupted(f"the SSH connection to {self.name} broke: {text}")

    async def close(self) -> None:
        for one in self._shared:
            await _end(one.process)
        self._shared = []
        if self._place is not None:
            await asyncio.to_thread(shutil.rmtree, self._place, ignore_errors=True)
            self._place = None


async def _end(process: asyncio.subprocess.Process) -> None:
    kill_group(process)
    await process.communicate()


def kill_group(process: asyncio.subprocess.Process) -> None:
    """A process that was started as the first of a session, and what it started there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def script_file() -> str:
    """The scripts that are put on a machine."""
    return (Path(__file__).parents[2] / "inside" / "machine.sh").read_text()
