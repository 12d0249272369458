"""Sandboxes on images of Apptainer, for machines without Docker: as an ordinary user, on this machine or on one that is reached
by `ssh`.

An image is a folder, a SIF file, an archive of Docker's or OCI's, or a name that Apptainer can pull; what is no folder is
unpacked once. The sandbox is that of the ssh backend: an overlay that Apptainer mounts cannot remove directories of an image.
"""

from __future__ import annotations

from typing import ClassVar

from rollyard.sandbox.machine.provider import MachineProvider
from rollyard.sandbox.machine.shells import LocalShell, SSHShell
from rollyard.sandbox.providers.ssh import SESSIONS
from rollyard.sandbox.remote.backend import RemoteBackend
from rollyard.sandbox.retry import OpenLimits

_SETTINGS = "/.singularity.d/env/10-docker2singularity.sh"  # the environment of a Docker image


class ApptainerBackend(RemoteBackend):
    """`image` stands for `host` in a spec: `host` is the machine's own programs; `folder` is where
    sandboxes are kept, on a disk of the machine; `host` and `config` are another machine's, as for the ssh backend."""

    name: ClassVar[str] = "apptainer"
    min_lease_s: ClassVar[float] = 5.0

    def __init__(
        self,
        *,
        image: str = "host",
        folder: str | None = None,
        host: str | None = None,
        config: str | None = None,
        sessions: int = SESSIONS,
        own_connections: bool = True,
        lease_s: float = 60.0,
        limits: OpenLimits | None = None,
    ) -> None:
        shell = (
            SSHShell(host, config=config, sessions=sessions, own_connections=own_connections) if host else LocalShell()
        )
        super().__init__(
            MachineProvider(shell, kind="apptainer", folder=folder, settings=_SETTINGS),
            image=image,
            isolation="namespace",
            lease_s=lease_s,
            limits=limits,
            snapshot=True,
            stdin=True,
            root=True,
            network_none=True,
            extend=True,
        )
