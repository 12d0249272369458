"""From the host and port that a program asks for to an address to connect to, or a reason not to.

A name is looked up once, here, and the connection goes to the address that was checked: what DNS says a moment later means
nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import NamedTuple

from rollyard.core.egress import WEB_PORTS, Address, HostRule, is_address, normal_name, parse_rule, read_address

Resolve = Callable[[str], Awaitable[Sequence[str]]]
_RESOLVE_S = 10.0


class NotAllowed(Exception):
    """Why a connection is refused."""


class NoAddress(NotAllowed):
    """A name that DNS knows no address of, or does not answer for."""


class Destination(NamedTuple):
    """Where a connection goes."""

    host: str
    port: int
    address: str
    named: bool  # by a name, not by its address


class EgressRules:
    def __init__(self, hosts: Sequence[str], resolve: Resolve | None = None) -> None:
        self.rules = tuple(parse_rule(host) for host in hosts)
        self._resolve = resolve or ask_resolver

    def allows_name(self, name: str) -> bool:
        return any(rule.covers_name(name) for rule in self._for_names())

    def ports(self, name: str) -> tuple[int, ...]:
        """The ports at which a name may be connected to without the proxy's help."""
        own = (rule for rule in self._for_names() if rule.covers_name(name))
        return tuple(sorted({port for rule in own for port in (WEB_PORTS if rule.port is None else (rule.port,))}))

    def permits(self, host: str, port: int) -> bool:
        try:
            return bool(self._find(host, port)[1])
        except NotAllowed:
            return False

    async def find(self, host: str, port: int) -> Destination:
        where, rules = self._find(host, port)
        if not isinstance(where, str):
            if not any(rule.leads_to(where) for rule in rules):
                raise NotAllowed("this address is not public, and no rule names it")
            return Destination(str(where), port, str(where), named=False)
        fixed = [
            rule.address for rule in rules if rule.address and is_address(rule.address) and "/" not in rule.address
        ]
        found = fixed or await self._look_up(where)
        for text in found:
            address = ip_address(text)
            if any(rule.leads_to(address) for rule in rules):
                return Destination(where, port, str(address), named=True)
        if not found:
            raise NoAddress("the name has no address")
        raise NotAllowed(f"the name leads to {found[0]}, which is not public, and no rule names it")

    def _find(self, host: str, port: int) -> tuple[str | Address, list[HostRule]]:
        """The name or address in its plain form, and the rules that allow it."""
        try:
            address = read_address(host)
            where = normal_name(host) if address is None else address
        except ValueError:
            raise NotAllowed("neither a host name nor a plain address") from None
        if isinstance(where, str):
            rules = [rule for rule in self._for_names() if rule.covers_name(where)]
        else:
            rules = [rule for rule in self.rules if rule.covers_address(where)]
        if not rules:
            raise NotAllowed(f"no rule allows this {'name' if isinstance(where, str) else 'address'}")
        if not (rules := [rule for rule in rules if rule.covers_port(port)]):
            raise NotAllowed("no rule allows this port")
        return where, rules

    def _for_names(self) -> list[HostRule]:
        return [rule for rule in self.rules if not is_address(rule.host)]

    async def _look_up(self, name: str) -> Sequence[str]:
        try:
            async with asyncio.timeout(_RESOLVE_S):
                return await self._resolve(name)
        except (OSError, TimeoutError, UnicodeError):
            return ()


async def ask_resolver(name: str) -> list[str]:
    """This machine's own answer. The dot at the end keeps its search domains out."""
    found = await asyncio.get_running_loop().getaddrinfo(f"{name}.", None, type=socket.SOCK_STREAM)
    return [str(place[4][0]).partition("%")[0] for place in found]
