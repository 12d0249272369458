"""A listening socket for a server of this room: open before the ready line, so that nobody who read it is refused."""

from __future__ import annotations

import socket

from rollyard.core.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def listening(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --port") from error
    return sock
