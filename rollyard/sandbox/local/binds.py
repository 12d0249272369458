"""What of the host is shown inside a sandbox beside its image: mounts, volumes, and the files that names are looked up in.

A bind is a part of the plan that the launcher carries out: `target` inside, `source` outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollyard.core.sandbox import SandboxSpec, Volume
from rollyard.images import host as host_image
from rollyard.sandbox import egress
from rollyard.sandbox.local.journal import Home


def list_binds(home: Home, spec: SandboxSpec, beside: Home) -> list[dict[str, Any]]:
    """`beside` is the sandbox whose files hold the volumes: this one, or the one that it is opened beside."""
    binds = [make_bind(m.local_dir, str(Path(m.remote_dir).resolve()), writable=m.writable) for m in spec.mounts]
    binds += [make_bind(v.path, _make_volume(beside, v), writable=v.writable) for v in spec.volumes]
    if spec.network == "allowlist":
        binds.append(make_bind("/etc/resolv.conf", _write_file(home, "resolv.conf", egress.RESOLV_CONF)))
    if spec.names:
        hosts = _write_file(home, "hosts", host_image.describe_hosts(spec.names))
        binds.append(make_bind("/etc/hosts", hosts, writable=True))
    return binds


def make_bind(target: str, source: str, *, writable: bool = False) -> dict[str, Any]:
    return {"target": target, "source": source, "over": [], "writable": writable}


def _write_file(home: Home, name: str, text: str) -> str:
    path = home.path / name
    path.write_text(text)
    path.chmod(0o644)
    return str(path)


def _make_volume(beside: Home, volume: Volume) -> str:
    """The volume's directory. It ends with the sandbox that it is kept with, and what is in it counts as written there."""
    place = beside.fs / "volumes" / volume.name
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o777)  # below a directory that only this user may enter
    return str(place)
