"""TCP between host and sandbox: sockets made inside its network namespace and used from here."""

from __future__ import annotations

import asyncio
import socket


class SocketStream:
    """A connected socket as a `ByteStream`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._sock, max_bytes)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def send_eof(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        self._sock.close()


class SocketListener:
    """A socket that listens on 127.0.0.1:`port` inside the sandbox. Only that sandbox can connect to it."""

    def __init__(self, sock: socket.socket, port: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.port = port

    async def accept(self) -> SocketStream:
        connection, _ = await asyncio.get_running_loop().sock_accept(self.sock)
        return SocketStream(connection)

    async def aclose(self) -> None:
        self.sock.close()
