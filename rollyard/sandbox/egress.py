"""How a sandbox without a network gets the hosts of its allow-list: the egress proxy is put behind listeners inside of it.

Programs find it by the usual variables, and those that do not look by DNS: `resolv.conf` names the proxy, and an allowed name
is an address of the sandbox's own loopback that leads to that name's host. Where a backend can only listen at 127.0.0.1 (the
relay), the variables are all there is.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Protocol

from rollyard.core.egress import HostRule, is_address, parse_rule
from rollyard.core.errors import Error
from rollyard.core.protocols import Listener, Sandbox
from rollyard.net.egress.proxy import EgressProxy

ADDRESS = "127.64.0.1"
RELAYED = "127.0.0.1"
PORT = 3128
RESOLV_CONF = f"nameserver {ADDRESS}\n"
_DNS = 53


class LoopbackPorts(Protocol):
    """A backend that can make sockets at any address of a sandbox's loopback."""

    async def listen_at(self, address: str, port: int) -> Listener: ...
    async def bind_datagrams(self, address: str, port: int) -> socket.socket: ...


def variables(address: str = ADDRESS, own_names: Sequence[str] = ()) -> dict[str, str]:
    """The proxy variables of programs. Its own loopback, where the gate and its services are, a sandbox reaches by itself."""
    proxy, own = f"http://{address}:{PORT}", ",".join(("localhost", "127.0.0.1", "::1", *own_names))
    names = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": own}
    return names | {name.lower(): value for name, value in names.items()}


async def attach(sandbox: Sandbox, hosts: Sequence[str], ports: LoopbackPorts | None) -> EgressProxy:
    """The proxy of this sandbox, at work. It ends with `aclose`, or with this process: then the sandbox reaches nothing."""
    proxy = EgressProxy(sandbox.id, hosts, ports=ports)
    if ports is None:
        proxy.serve_proxy(await sandbox.listen(PORT))
        return proxy
    proxy.serve_proxy(await ports.listen_at(ADDRESS, PORT))
    proxy.serve_dns(await ports.listen_at(ADDRESS, _DNS))
    await proxy.serve_datagrams(await ports.bind_datagrams(ADDRESS, _DNS))
    for rule in map(parse_rule, hosts):
        if rule.port is not None and (address := _find_loopback(rule)) is not None:
            with contextlib.suppress(Error):  # something of the sandbox's own is there
                proxy.serve_host(await ports.listen_at(address, rule.port), rule.host, rule.port)
    return proxy


def _find_loopback(rule: HostRule) -> str | None:
    """Where in the sandbox a rule's own loopback address has to be listened at: programs take no proxy for it."""
    if rule.host == "localhost":
        return RELAYED
    if is_address(rule.host) and "/" not in rule.host and ip_address(rule.host).is_loopback and ":" not in rule.host:
        return rule.host
    return None
