"""Deleting a container over a plain blocking socket, for the last moments of a process: no loop, no client, no exception."""

from __future__ import annotations

import http.client
import socket
from urllib.parse import urlsplit

_ONE_S = 30.0


def delete_now(host: str, container: str, seconds: float) -> bool:
    """Whether it is gone. An engine behind ssh or TLS is not reached this way; its containers end with their keeper."""
    connection = _connection(host, min(_ONE_S, seconds))
    if connection is None:
        return False
    try:
        connection.request("DELETE", f"/containers/{container}?force=1&v=1", headers={"Host": "engine"})
        return connection.getresponse().status in (200, 204, 404)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("engine", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(host: str, timeout: float) -> http.client.HTTPConnection | None:
    if host.startswith("unix://"):
        return _Unix(host.removeprefix("unix://"), timeout)
    parts = urlsplit(host)
    if parts.scheme not in ("tcp", "http") or not parts.hostname:
        return None
    return http.client.HTTPConnection(parts.hostname, parts.port or 2375, timeout=timeout)
