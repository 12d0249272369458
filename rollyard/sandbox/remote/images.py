"""Images of a hosted backend: what a task says becomes an image that the provider keeps, made once and found again by a digest.

Whatever a provider takes as an image goes to it by name. A Dockerfile is carried out in a sandbox of its base, and a layer is
unpacked into one; the provider keeps that sandbox as an image under a name that says what it is and ends in the digest of all
that it came from. Who makes it holds a lock of this machine, and its sandbox, with its end, tells other machines that it is being
made. A provider that keeps no images has the Dockerfile carried out in each sandbox, and the layer uploaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from rollyard.core.cache import cache_home, hold_lock_async
from rollyard.core.protocols import Backend, Sandbox
from rollyard.core.sandbox import Network, Resources, SandboxSpec
from rollyard.images.build import carry_out
from rollyard.images.build_context import Context
from rollyard.images.build_types import BuildOptions, Built
from rollyard.sandbox.remote.box import RemoteSandbox
from rollyard.sandbox.remote.provider import KEPT, KeptImage, SandboxProvider

BAKING = "rollyard.baking"  # the label of a sandbox that is to become an image
_FORMAT = "1"
_BAKE_S = 1800.0
_LOOK_S = 2.0


class BuiltImage(msgspec.Struct, frozen=True, kw_only=True):
    """What a Dockerfile gave: the image to open, what programs in it are started with, and the folder of a Dockerfile that is
    still to be carried out in each sandbox."""

    image: str
    built: Built
    resources: Resources = Resources()
    folder: str | None = None


class RemoteImages:
    """`backend` is the one that this is a part of; `default` stands for `host` in a spec."""

    def __init__(
        self, backend: Backend, provider: SandboxProvider, *, default: str, name: str, network_none: bool
    ) -> None:
        self._backend, self._provider, self._default, self._name = backend, provider, default, name
        self._network_none = network_none
        self._made: dict[str, BuiltImage] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def find(self, image: str) -> BuiltImage | None:
        return self._made.get(image)

    async def build(self, folder: str, resources: Resources, timeout_s: float) -> str:
        """The image of a Dockerfile, by the digest of its folder, its base and what was asked for."""
        options = BuildOptions(timeout_s=timeout_s, resources=resources, network=self._network)
        meant = await carry_out(folder, self._backend, None, options)
        packed = await asyncio.to_thread(lambda: Context(Path(folder)).pack().getvalue())
        name = name_image(_title(folder), packed, self._means(meant.image).encode(), msgspec.json.encode(resources))

        async def act(box: Sandbox) -> None:
            await carry_out(folder, self._backend, box, options)

        kept = await self._keep(name, meant.image, resources, act)
        image = kept or name
        left = None if kept else folder
        self._made[image] = BuiltImage(image=kept or meant.image, built=meant, resources=resources, folder=left)
        return image

    async def bake(
        self, image: str, layer: str, *, title: str, source: str, prefix: str, resources: Resources
    ) -> str | None:
        """An image with a layer in it; None where the provider keeps none."""
        made = self.find(image)
        if made is not None and made.folder is not None:
            return None
        name = self._name_baked(image, layer, title, resources)

        async def act(box: Sandbox) -> None:
            await box.upload_dir(source, prefix)

        kept = await self._keep(name, image, resources, act)
        if kept is not None:
            built = made.built if made is not None else Built(image=kept, workdir="")
            self._made[kept] = BuiltImage(image=kept, built=built, resources=resources)
        return kept

    async def find_baked(self, image: str, layer: str, *, title: str, resources: Resources) -> str | None:
        return await self._provider.find_image(self._name_baked(image, layer, title, resources))

    def _name_baked(self, image: str, layer: str, title: str, resources: Resources) -> str:
        return name_image(title, self._means(image).encode(), layer.encode(), msgspec.json.encode(resources))

    async def carry_out(self, made: BuiltImage, box: RemoteSandbox, timeout_s: float) -> None:
        assert made.folder is not None
        await carry_out(made.folder, self._backend, box, BuildOptions(timeout_s=timeout_s, network=self._network))

    async def list_kept(self) -> list[KeptImage]:
        return [one for one in await self._provider.list_images() if one.name.startswith(KEPT)]

    async def _keep(
        self, name: str, base: str, resources: Resources, act: Callable[[Sandbox], Awaitable[None]]
    ) -> str | None:
        if not self._provider.keeps_images:
            return None
        lock = cache_home() / "baked" / f"{self._name}-{name}"
        async with self._locks.setdefault(name, asyncio.Lock()), hold_lock_async(lock, _BAKE_S):
            if (found := await self._find(name)) is not None:
                return found
            spec = SandboxSpec(
                image=base,
                ttl_s=_BAKE_S,
                boot_s=600.0,
                labels={BAKING: name},
                resources=resources,
                network=self._network,
                allow_unsafe=self._network == "host",
            )
            async with self._backend.open(spec) as box:
                assert isinstance(box, RemoteSandbox)
                await act(box)
                return await box.keep_image(name)

    async def _find(self, name: str) -> str | None:
        """It is there, or another machine is making it: then until it is there, or its maker is gone."""
        until = time.monotonic() + _BAKE_S
        while True:
            if (found := await self._provider.find_image(name)) is not None:
                return found
            if not await self._backend.list({BAKING: name}) or time.monotonic() > until:
                return await self._provider.find_image(name)
            await asyncio.sleep(_LOOK_S)  # only the provider knows; it is asked

    def _means(self, image: str) -> str:
        return self._default if image == "host" else image

    @property
    def _network(self) -> Network:
        return "none" if self._network_none else "host"


def name_image(title: str, *parts: bytes) -> str:
    """A name that says what it is and ends in a digest of what it came from."""
    digest = hashlib.sha256(b"\0".join((_FORMAT.encode(), *(hashlib.sha256(part).digest() for part in parts))))
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-")
    return f"{KEPT}{words or 'image'}-{digest.hexdigest()[:20]}"


def _title(folder: str) -> str:
    """A task's folder says more than the `environment` in it."""
    place = Path(folder).resolve()
    return place.parent.name if place.name in ("environment", "tests") else place.name
