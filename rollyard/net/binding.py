"""A listening socket: open before a server says that it is ready, so that no client that read the line is refused."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from rollyard.core.errors import CannotListen, ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"{port} is not a port", hint="0 to 65535; 0 picks a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: asyncio sends small parts at once (TCP_NODELAY) only on sockets that say they are TCP.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except socket.gaierror as error:
        sock.close()
        raise ConfigError(
            f"{host!r} is no address", hint="name an address of this machine, such as 127.0.0.1"
        ) from error
    except OSError as error:
        sock.close()
        raise CannotListen(host, port, error) from error
    return sock


def listen_unix(path: str) -> socket.socket:
    """For its owner alone. A socket that no program listens on any more is replaced."""
    place = Path(path)
    if place.exists() and not place.is_socket():
        raise ConfigError(f"cannot listen on {path}: it is there and is no socket", hint="choose another path")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if place.is_socket():
            _refuse_taken(path)
            place.unlink()
        sock.bind(path)
        place.chmod(0o600)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise CannotListen(path, None, error) from error
    return sock


def _refuse_taken(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)  # a program that is behind with accepting is there too
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, "")


def http_url(host: str, port: int, *, secure: bool = False) -> str:
    """The URL of an address; an IPv6 one stands in brackets."""
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
