"""What a sandbox may reach beyond itself: rules for hosts, what a caller allows (`--network`), and what was refused.

A rule is `HOST[:PORT][@ADDRESS]`. HOST is a name, `*.name` (names below it), `*` (any name), an address or a network. Without a
PORT it is 80 and 443. A name leads to public addresses alone, unless ADDRESS (an address, a network or `*`) names others: a
name server that answers with the address of something here (rebinding) changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal, NamedTuple, Protocol

import msgspec

from rollyard.core.errors import ConfigError

Address = IPv4Address | IPv6Address
WEB_PORTS = (80, 443)
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")
# What no rule means by a name: this machine, its neighbours, and addresses that stand for no host.
_NOT_PUBLIC = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/3", "::/96", "64:ff9b:1::/48", "100::/64", "fc00::/7", "fe80::/10",
        "fec0::/10", "ff00::/8",
    )
)  # fmt: skip
_WRAPPED = (ip_network("64:ff9b::/96"), ip_network("2002::/16"))  # an IPv4 address inside of an IPv6 one


class HostRule(NamedTuple):
    host: str
    port: int | None
    address: str | None

    def covers_name(self, name: str) -> bool:
        if self.host == "*":
            return True
        return name.endswith(self.host[1:]) if self.host.startswith("*.") else name == self.host

    def covers_address(self, address: Address) -> bool:
        """Whether a request may name this address itself."""
        return is_address(self.host) and address in ip_network(self.host)

    def covers_port(self, port: int) -> bool:
        return self.host == "*" or port == self.port or (self.port is None and port in WEB_PORTS)

    def leads_to(self, address: Address) -> bool:
        """Whether what it names may be at this address."""
        if self.address is None:
            return is_public(address)
        return self.address == "*" or address in ip_network(self.address)

    @property
    def text(self) -> str:
        host = f"[{self.host}]" if ":" in self.host and self.port is not None else self.host
        return host + (f":{self.port}" if self.port is not None else "") + (f"@{self.address}" if self.address else "")


def is_public(address: Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    address = mapped or address
    return not any(address in network for network in (*_NOT_PUBLIC, *_WRAPPED) if network.version == address.version)


def is_address(host: str) -> bool:
    """Whether it is an address or a network, and not a name."""
    try:
        ip_network(host)
    except ValueError:
        return False
    return True


def normal_name(host: str) -> str:
    """A name as rules have it. Raises ValueError for what is none: a number in any spelling, an odd character."""
    name = host.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
        raise ValueError(f"{host!r} is not a host name")
    return name


def parse_rule(text: str) -> HostRule:
    host, _, address = text.strip().lower().partition("@")
    try:
        if address not in ("", "*"):
            address = ip_network(address).compressed.removesuffix("/32").removesuffix("/128")
        elif "@" in text and not address:
            raise ValueError("no address behind @")
        host, port = _split_port(host)
        if is_address(host):
            host = ip_network(host).compressed.removesuffix("/32").removesuffix("/128")
        elif host != "*":
            host = ("*." if host.startswith("*.") else "") + normal_name(host.removeprefix("*."))
    except ValueError as error:
        raise ConfigError(
            f"{text!r} allows no host: {error}", hint="HOST[:PORT][@ADDRESS]: a name, *.name, an address or a network"
        ) from None
    return HostRule(host, port, address or None)


def _split_port(host: str) -> tuple[str, int | None]:
    if host.startswith("["):
        host, closed, rest = host[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ValueError("a bracket is missing")
        text = rest[1:]
    else:
        host, _, text = host.partition(":") if host.count(":") == 1 else (host, "", "")
    if not text:
        return host, None
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"{text!r} is not a port")
    return host, int(text)


class NetworkOption(msgspec.Struct, frozen=True):
    """What a caller allows tasks to reach: what they ask for, nothing, these hosts, or the public network."""

    kind: Literal["task", "none", "allow", "public"]
    hosts: tuple[str, ...] = ()


def parse_network_option(text: str) -> NetworkOption:
    """`task`, `none`, `public`, or `allow:HOST,...`. An address that is named by itself may be any, this machine's too."""
    kind, colon, rest = text.partition(":")
    if kind == "allow" and colon:
        rules = [parse_rule(host) for host in rest.split(",") if host.strip()]
        if not rules:
            raise ConfigError("network allow: names no host", hint="say allow:HOST,..., or none")
        named = (rule._replace(address=rule.host) if is_address(rule.host) else rule for rule in rules)
        return NetworkOption("allow", tuple(dict.fromkeys(rule.text for rule in named)))
    if colon or kind not in ("task", "none", "public"):
        raise ConfigError(f"network is task, none, allow:HOST,... or public, got {text!r}")
    return NetworkOption(kind)


def parse_build_network(text: str) -> NetworkOption:
    """What the commands of Dockerfiles may reach (`--build-network`): `none`, `allow:HOST,...` or `public`."""
    if text not in ("none", "public") and not text.startswith("allow:"):
        raise ConfigError(f"builds have the network none, allow:HOST,... or public, not {text!r}")
    option = parse_network_option(text)
    if "*" in option.hosts:
        raise ConfigError(f"{text!r} lets builds reach every host", hint="say public where that is meant")
    return option


TaskNetwork = tuple[str | None, tuple[str, ...]]  # `network` and `allowed_hosts` of a task


def narrow(wanted: TaskNetwork, option: NetworkOption) -> TaskNetwork:
    """What is given of what a task asks for: never more than it asks, where it says something, and never more than is wished."""
    network, hosts = wanted
    if option.kind == "none" or network == "none":
        return "none", ()
    if option.kind == "task":
        return ("none", ()) if network == "host" else wanted
    if option.kind == "public":
        return ("host", ()) if network is None else wanted
    if network != "allowlist":
        return "allowlist", option.hosts
    theirs = [parse_rule(host) for host in hosts]
    both = tuple(text for text in option.hosts if any(_is_within(parse_rule(text), rule) for rule in theirs))
    mine = [parse_rule(text) for text in option.hosts]
    both += tuple(rule.text for rule in theirs if any(_is_within(rule, one) for one in mine))
    return ("allowlist", tuple(dict.fromkeys(both))) if both else ("none", ())


def _is_within(rule: HostRule, other: HostRule) -> bool:
    """Whether `other` allows all the hosts of `rule`; the ports and addresses are those of `rule`."""
    if rule.port is not None and not other.covers_port(rule.port):
        return False
    if is_address(rule.host):
        if not is_address(other.host):
            return False
        inner, outer = ip_network(rule.host), ip_network(other.host)
        return inner.version == outer.version and int(inner[0]) >= int(outer[0]) and int(inner[-1]) <= int(outer[-1])
    if rule.port is None and other.port is not None and other.host != "*":
        return False
    if rule.host.startswith("*"):
        return other.host == "*" or (other.host.startswith("*.") and rule.host.endswith(other.host[1:]))
    return not is_address(other.host) and other.covers_name(rule.host)


class EgressRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A connection or a question to DNS that was refused. `sandbox_id` is where it came from."""

    sandbox_id: str
    protocol: Literal["dns", "connect", "http", "tls", "tcp"]
    host: str
    port: int | None
    reason: str


class Egress(Protocol):
    """The rules of one open sandbox."""

    def allow(self, hosts: Sequence[str]) -> None:
        """These hosts from now on; connections to others end."""
        ...

    async def aclose(self) -> None: ...


def read_address(host: str) -> Address | None:
    """The address that a request names, in its one plain spelling; None for anything else."""
    try:
        address = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise ValueError("an address with a zone")
        return address.ipv4_mapped or address
    return address
