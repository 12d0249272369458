"""A listening socket for a server of this room: open before the ready line, so that nobody who read it is refused."""

from __future__ import annotations

import socket

from rollyard.core.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: asyncio sends small parts at once (TCP_NODELAY) only on sockets that say they are TCP.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --port") from error
    return sock
