"""What a spec may ask of the local backend, checked before anything is made. Each refusal says what to do instead."""

from __future__ import annotations

from pathlib import Path

from rollyard.core.egress import parse_rule
from rollyard.core.errors import ConfigError, IsolationTooWeak, Unsupported
from rollyard.core.sandbox import Capabilities, SandboxSpec, at_least
from rollyard.sandbox.gpus import SHARE

OPTIONS = frozenset({"nesting", "ports", SHARE})
_WEAK = "`rollyard doctor` says what is missing; or lower min_isolation"
MAX_LABELS, MAX_LABEL_NAME, MAX_LABEL_VALUE = 256, 256, 4096


def check(spec: SandboxSpec, got: Capabilities, allowed_mounts: tuple[Path, ...]) -> None:
    if not at_least(got.isolation, spec.min_isolation):
        raise IsolationTooWeak(
            f"the local backend gives isolation {got.isolation!r} here, {spec.min_isolation!r} was asked for",
            hint=_WEAK,
        )
    if got.isolation == "none" and not spec.allow_unsafe:
        raise IsolationTooWeak(
            "nothing isolates programs on this machine", hint="say allow_unsafe=True to run them anyway"
        )
    if spec.user not in (None, "root", "0") and not got.users:
        raise Unsupported(
            "there is only one user id for sandboxes here",
            hint="run as root, or add ranges to /etc/subuid and /etc/subgid",
        )
    _network(spec, got)
    _labels(spec)
    if unknown := set(spec.options) - OPTIONS:
        raise Unsupported(f"the local backend has no option {sorted(unknown)}", hint=f"it has {sorted(OPTIONS)}")
    if spec.options.get("nesting") and not spec.allow_unsafe:
        raise ConfigError("options.nesting weakens the system-call filter", hint="say allow_unsafe=True")
    if spec.options.get("nesting") and any(not mount.writable for mount in spec.mounts):
        raise ConfigError(
            "options.nesting lets programs make a read-only mount writable", hint="drop the mount, or say writable=True"
        )
    if not got.images and (spec.image != "host" or spec.layers or spec.mounts):
        raise Unsupported(
            f"images, layers and mounts need namespaces or ptrace, and isolation here is {got.isolation!r}",
            hint="`rollyard doctor` says what is missing",
        )
    if (spec.layers or spec.mounts) and not (got.layers and got.mounts):
        raise Unsupported(f"layers and mounts need isolation 'landlock' or stronger; here it is {got.isolation!r}")
    if spec.disk == "tmpfs" and not got.disk_limit:
        raise Unsupported(
            f"disk='tmpfs' needs namespaces, and isolation here is {got.isolation!r}", hint="use disk='disk'"
        )
    if (spec.beside or spec.volumes or spec.names) and not got.services:
        raise Unsupported(
            f"sandboxes that share a network or volumes need namespaces and /proc, and isolation here is {got.isolation!r}",
            hint="`rollyard doctor` says what is missing",
        )
    if spec.resources.gpus and not got.gpus:
        raise Unsupported(
            f"resources.gpus={spec.resources.gpus}: there is no GPU for sandboxes here",
            hint="it needs device nodes such as /dev/nvidia0, and namespaces",
        )
    if spec.beside and spec.lifetime != "owner":
        raise Unsupported("a sandbox beside another one ends with its opener", hint="say lifetime='owner'")
    for mount in spec.mounts:
        _mount(mount.remote_dir, mount.local_dir, allowed_mounts)


def _labels(spec: SandboxSpec) -> None:
    if len(spec.labels) > MAX_LABELS:
        raise ConfigError(f"a sandbox has at most {MAX_LABELS} labels, got {len(spec.labels)}")
    for name, value in spec.labels.items():
        if len(name) > MAX_LABEL_NAME or len(value) > MAX_LABEL_VALUE:
            raise ConfigError(
                f"label {name[:MAX_LABEL_NAME]!r} is too long",
                hint=f"names have at most {MAX_LABEL_NAME} characters, values {MAX_LABEL_VALUE}",
            )


def _network(spec: SandboxSpec, got: Capabilities) -> None:
    if spec.network == "allowlist" and not got.network_allowlist:
        raise Unsupported(
            f"a network allow-list needs namespaces, and isolation here is {got.isolation!r}",
            hint="`rollyard doctor` says what is missing; or say --network none",
        )
    for host in spec.allowed_hosts:
        parse_rule(host)
    if spec.network == "host" and not spec.allow_unsafe:
        raise ConfigError(
            "network='host' exposes this machine's loopback services to the sandbox",
            hint="use network='none', or say allow_unsafe=True",
        )
    if spec.network == "none" and not got.network_none and not spec.allow_unsafe:
        raise Unsupported(
            f"network='none' needs namespaces or Landlock of Linux 6.7, and isolation here is {got.isolation!r}: "
            "the host's network stays in reach",
            hint="`rollyard doctor` says what is missing; say allow_unsafe=True to share the network",
        )


def _mount(source: str, target: str, allowed: tuple[Path, ...]) -> None:
    path = Path(source).resolve()
    if not any(path.is_relative_to(place) for place in allowed):
        raise ConfigError(
            f"the mount of {source!r} is not allowed", hint="name the directory in backend('local', mounts=[...])"
        )
    if not path.is_dir():
        raise ConfigError(f"the mount of {source!r} is not a directory on this host")
    if not target.startswith("/") or target == "/":
        raise ConfigError(f"a mount needs an absolute place inside, got {target!r}")
