"""The client's socket through a proxy: the `websockets` package's connection in the shape of `client_socket.Socket`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_socket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from rollyard.net.websocket_client import LIMIT, Lost, Socket, refuse


async def dial_through(url: str, *, subprotocol: str, headers: Mapping[str, str], ping_s: float) -> Socket:
    try:
        return ProxiedSocket(
            await open_socket(
                url,
                subprotocols=[Subprotocol(subprotocol)],
                additional_headers=dict(headers),
                ping_interval=ping_s,
                ping_timeout=ping_s,
                max_size=LIMIT,
                compression=None,
                proxy=True,
            )
        )
    except InvalidStatus as error:
        raise refuse(url, error.response.status_code) from error
    except InvalidHandshake as error:
        raise Lost(str(error)) from error


class ProxiedSocket:
    def __init__(self, connection: ClientConnection) -> None:
        self.subprotocol: str | None = connection.subprotocol
        self._connection = connection
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._heard: Callable[[bytes], None] = self._incoming.put_nowait
        self._lost: Callable[[], None] = lambda: self._incoming.put_nowait(None)
        loop = asyncio.get_running_loop()
        self._tasks = (loop.create_task(self._read()), loop.create_task(self._write()))

    def listen(self, heard: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._heard, self._lost = heard, lost
        while not self._incoming.empty():
            message = self._incoming.get_nowait()
            lost() if message is None else heard(message)

    def send(self, text: bytes) -> None:
        self._outgoing.put_nowait(text)

    async def recv(self) -> bytes:
        message = await self._incoming.get()
        if message is None:
            raise Lost("the connection is closed")
        return message

    def pending(self) -> bytes | None:
        return None if self._incoming.empty() else self._incoming.get_nowait()

    async def close(self) -> None:
        self._lost = lambda: None
        await self._outgoing.join()
        for task in self._tasks:
            task.cancel()
        await self._connection.close()

    async def _read(self) -> None:
        try:
            while True:
                self._heard(await self._connection.recv(decode=False))
        except ConnectionClosed:
            self._lost()

    async def _write(self) -> None:
        while True:
            text = await self._outgoing.get()
            try:
                await self._connection.send(text, text=True)
            except ConnectionClosed:
                pass  # the reader learns it
            finally:
                self._outgoing.task_done()
