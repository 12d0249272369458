"""Sandboxes on any machine that can be logged in to with `ssh`: nothing has to be installed on it.

A sandbox there is a set of namespaces of an ordinary user, over the machine's own programs or over a folder with an image. A root
login is not used as root: it becomes `nobody` first.
"""

from __future__ import annotations

import os
from typing import ClassVar

from rollyard.sandbox.machine.provider import MachineProvider
from rollyard.sandbox.machine.shells import SSHShell
from rollyard.sandbox.remote.backend import RemoteBackend
from rollyard.sandbox.remote.provider import require_key
from rollyard.sandbox.retry import OpenLimits

SESSIONS = 8  # OpenSSH's server carries ten on a connection, and one of them keeps it open


class SSHBackend(RemoteBackend):
    """`host` is a name of the user's SSH configuration or `user@host` (else `ROLLYARD_SSH_HOST`); `config` is another
    configuration file (else `ROLLYARD_SSH_CONFIG`, else the user's own); `folder` is where the machine keeps sandboxes, on a
    disk of its own; `own_connections=False` uses the connections that the configuration shares."""

    name: ClassVar[str] = "ssh"
    min_lease_s: ClassVar[float] = 5.0

    def __init__(
        self,
        *,
        host: str | None = None,
        config: str | None = None,
        folder: str | None = None,
        sessions: int = SESSIONS,
        own_connections: bool = True,
        lease_s: float = 60.0,
        limits: OpenLimits | None = None,
    ) -> None:
        found = require_key(
            "ssh",
            host or os.environ.get("ROLLYARD_SSH_HOST"),
            what="machine",
            hint="set ROLLYARD_SSH_HOST, or pass host=",
        )
        shell = SSHShell(
            found,
            config=config or os.environ.get("ROLLYARD_SSH_CONFIG"),
            sessions=sessions,
            own_connections=own_connections,
        )
        super().__init__(
            MachineProvider(shell, kind="namespaces", folder=folder),
            image="host",
            isolation="namespace",
            lease_s=lease_s,
            limits=limits,
            snapshot=True,
            stdin=True,
            root=True,
            network_none=True,
            extend=True,
        )
