"""What a sandbox's root is made of, as the image store hands it to a backend: lower directories and host trees."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class HostTree(msgspec.Struct, frozen=True, kw_only=True):
    """A host directory shown at `target`. `writable` puts a private overlay over it; otherwise it is bound read-only.
    `over` are frozen uppers of earlier such overlays, topmost first: the overlay's lowers are `(*over, source)`."""

    target: str
    source: str
    writable: bool = False
    over: tuple[str, ...] = ()


class Rootfs(msgspec.Struct, frozen=True, kw_only=True):
    """`lowers` are host directories for `/`, topmost first, never written to. `trees` come on top of them, in order; the
    lowers hold an empty directory at each target. `env`, `workdir`, `user`, `entrypoint` and `cmd` are the image's
    own defaults."""

    lowers: tuple[str, ...]
    trees: tuple[HostTree, ...] = ()
    env: Mapping[str, str] = {}
    workdir: str = "/"
    user: str | None = None
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    image: str = ""
