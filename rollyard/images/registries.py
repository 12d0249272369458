"""Which registries may be asked, at which addresses, and which mirrors are asked before them.

A registry is named by the user, never by a task: with `--pull` or in the registries file. It is `[http://]HOST[:PORT][@ADDRESS]`,
a rule as of `--network` (`core/egress.py`): a name leads to public addresses unless the rule names others, so that neither the
author of a task nor a name server points this machine at its neighbours. Plain HTTP is for the loopback, and where it is said.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rollyard.core.egress import HostRule, is_address, parse_rule
from rollyard.core.errors import ConfigError
from rollyard.core.home import user_home
from rollyard.images.reference import DOCKER_HUB, ImageReference

VARIABLE = "ROLLYARD_REGISTRIES"
HUB_HOST = "registry-1.docker.io"
_ANY = "*"


class RegistryRule(msgspec.Struct, frozen=True):
    """A registry that may be asked; `rule` allows its host."""

    rule: HostRule
    secure: bool

    def covers(self, host: str, port: int) -> bool:
        if is_address(self.rule.host):
            named = is_address(host) and self.rule.covers_address(ip_address(host))
        else:
            named = not is_address(host) and self.rule.covers_name(host)
        return named and self.rule.covers_port(port)


class RegistryEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is asked for an image: a mirror, or the registry. `account` is what credentials are kept under."""

    url: str  # without /v2
    account: str
    rule: RegistryRule
    mirror: bool = False

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc


class Registries(msgspec.Struct, frozen=True, kw_only=True):
    """`allowed` are the registries that may be asked, `mirrors` the addresses that are asked first, by registry."""

    allowed: tuple[RegistryRule, ...] = ()
    mirrors: Mapping[str, tuple[str, ...]] = {}

    def with_registry(self, rule: RegistryRule) -> Registries:
        """With one more registry that may be asked, before the others."""
        return msgspec.structs.replace(self, allowed=(rule, *self.allowed))

    def endpoints(self, reference: ImageReference) -> tuple[RegistryEndpoint, ...]:
        """The servers to ask for an image, mirrors first; none where its registry may not be asked."""
        host, port = split_registry(reference.registry)
        found = next((one for one in self.allowed if one.covers(host, port or (443 if one.secure else 80))), None)
        if found is None:
            return ()
        mirrors = tuple(_mirror(url) for url in self.mirrors.get(reference.registry, ()))
        shown = f"[{host}]" if ":" in host else host
        place = shown if port is None else f"{shown}:{port}"
        url = f"{'https' if found.secure else 'http'}://{place}"
        return (*mirrors, RegistryEndpoint(url=url, account=reference.registry, rule=found))


class _RegistriesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pull: list[str] = []
    mirrors: dict[str, str | list[str]] = {}


def registries_file() -> Path:
    """`$ROLLYARD_REGISTRIES`, else `registries.toml` in the user's configuration."""
    if chosen := os.environ.get(VARIABLE):
        if not Path(chosen).is_file():
            raise ConfigError(f"{VARIABLE} names {chosen}, which is no file")
        return Path(chosen)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else user_home() / ".config") / "rollyard" / "registries.toml"


def read_registries(pull: Sequence[str] = (), *, mirrors: Mapping[str, Sequence[str]] | None = None) -> Registries:
    """Those of the registries file, and those that are given, which come first."""
    path = registries_file()
    try:
        text = path.read_text() if path.is_file() else ""
        file = msgspec.convert(tomllib.loads(text), _RegistriesFile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}", hint="it has pull = [REGISTRY, ...] and a table [mirrors]") from error
    known = {
        DOCKER_HUB if name in (HUB_HOST, "index.docker.io") else name.lower(): (
            (urls,) if isinstance(urls, str) else tuple(urls)
        )
        for name, urls in file.mirrors.items()
    }
    for name, urls in (mirrors or {}).items():
        known[name] = (*urls, *known.get(name, ()))
    for url in (url for urls in known.values() for url in urls):
        _mirror(url)
    rules = tuple(parse_registry(text) for text in (*pull, *file.pull))
    return Registries(allowed=rules, mirrors=known)


def parse_registry(text: str) -> RegistryRule:
    """`[http://]HOST[:PORT][@ADDRESS]`."""
    scheme, separator, rest = text.strip().partition("://")
    if separator and scheme not in ("http", "https"):
        raise ConfigError(f"{text!r} names no registry", hint="[http://]HOST[:PORT][@ADDRESS]")
    rule = parse_rule(rest.rstrip("/") if separator else text)
    if rule.host in (DOCKER_HUB, "index.docker.io"):
        rule = rule._replace(host=HUB_HOST)
    if is_address(rule.host):
        rule = rule._replace(address=rule.host)
    elif rule.host == "localhost" and rule.address is None:
        rule = rule._replace(address="127.0.0.1")
    return RegistryRule(rule, scheme == "https" if separator else not _is_loopback(rule.host))


def rule_for_reference(reference: ImageReference, *, secure: bool | None = None) -> RegistryRule:
    """The registry of a reference that the user typed: at whatever address it is."""
    host, port = split_registry(reference.registry)
    secure = not _is_loopback(host) if secure is None else secure
    if not is_address(host):
        address = "127.0.0.1" if host == "localhost" else _ANY
    else:
        address = host
    return RegistryRule(HostRule(host, port or (443 if secure else 80), address), secure)


def split_registry(registry: str) -> tuple[str, int | None]:
    """Host and port of the server itself: docker.io answers at another name."""
    parts = urlsplit(f"//{HUB_HOST if registry == DOCKER_HUB else registry}")
    try:
        return parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"{registry!r} names no registry: {error}") from None


def _mirror(url: str) -> RegistryEndpoint:
    """A mirror is of the user's own choice, so it may be at any address."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
        raise ConfigError(
            f"the mirror {_without_account(url)!r} is no address of a server", hint="http[s]://HOST[:PORT][/PATH]"
        )
    secure = parts.scheme == "https"
    rule = HostRule(host, port or (443 if secure else 80), host if is_address(host) else _ANY)
    if host == "localhost":
        rule = rule._replace(address="127.0.0.1")
    place = parts.netloc.lower()
    return RegistryEndpoint(
        url=f"{parts.scheme}://{place}{parts.path.rstrip('/')}",
        account=place,
        rule=RegistryRule(rule, secure),
        mirror=True,
    )


def _without_account(url: str) -> str:
    return url.rpartition("@")[2]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
