"""Sockets of a sandbox's network, which its supervisor makes and hands to the host."""

from __future__ import annotations

import os
import socket

from rollyard.sandbox.local.inner import landlock
from rollyard.sandbox.local.inner.microvm import Microvm
from rollyard.sandbox.local.inner.protocol import Message
from rollyard.sandbox.local.inner.requests import Request


class NetworkOperations:
    def __init__(self, confine: int | None, machine: Microvm | None) -> None:
        self._confine, self._machine = confine, machine

    def op_listen(self, asked: Request) -> Message:
        message = asked.message
        datagrams: bool = message.get("datagrams", False)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM) as sock:
            if not datagrams:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((message["address"], message["port"]))
            if not datagrams:
                sock.listen(1024)
            port = sock.getsockname()[1]
            if self._confine is not None:
                landlock.allow_port(self._confine, port)
            if self._machine is not None:
                self._machine.ask({"listen": [message["address"], port]})
            return {"port": port, "fds": (os.dup(sock.fileno()),)}

    def op_socket(self, asked: Request) -> Message:
        """A TCP socket of this network namespace; the host connects it. A virtual machine has another network: there the socket
        is connected already."""
        if self._machine is not None:
            return {"fds": (_dial(self._machine, asked.message["port"]),), "connected": True}
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            return {"fds": (os.dup(sock.fileno()),)}

    def op_namespaces(self, _asked: Request) -> Message:
        """The namespaces that a sandbox beside this one joins."""
        names = ("user", "net")
        return {"fds": tuple(os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names)}


def _dial(machine: Microvm, port: int) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        machine.ask({"dial": port}, [theirs.fileno()])
        return os.dup(ours.fileno())
