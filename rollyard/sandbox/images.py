"""The image store: turns the name of an image and the ids of layers into a `Rootfs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import msgspec

from rollyard.core.agent import LayerSpec
from rollyard.core.errors import UnknownName
from rollyard.sandbox.home import data_home, private_dir
from rollyard.sandbox.host import host_rootfs
from rollyard.sandbox.layers import LayerRecord, Layers
from rollyard.sandbox.rootfs import Rootfs


class ImageStore:
    """One directory of images, layers and snapshots. Everything in it is immutable once it has its name."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = private_dir(root or data_home())
        self.layers = Layers(self.root)

    async def resolve(self, image: str = "host", layers: Sequence[str] = ()) -> Rootfs:
        """What to mount for `image` with `layers` on top, lowest first."""
        if image == "host":
            base = await anyio.to_thread.run_sync(host_rootfs, self.root)
        else:
            raise UnknownName("image", image, ["host"], hint="add it with `rollyard image add SOURCE --name NAME`")
        trees = tuple(str(self.layers.tree(layer)) for layer in reversed(layers))
        return msgspec.structs.replace(base, lowers=(*trees, *base.lowers))

    async def layer(
        self,
        *,
        npm: Sequence[str] = (),
        pip: Sequence[str] = (),
        node: str | None = None,
        python: str | None = None,
    ) -> str:
        """Build (once) a layer with these packages and the interpreters they need; its id goes into `SandboxSpec.layers`."""
        return await self.build_layer(LayerSpec(npm=tuple(npm), pip=tuple(pip), node=node, python=python))

    async def build_layer(self, spec: LayerSpec) -> str:
        return await self.layers.build(spec)

    def layer_record(self, layer_id: str) -> LayerRecord:
        return self.layers.record(layer_id)


async def layer(
    *,
    npm: Sequence[str] = (),
    pip: Sequence[str] = (),
    node: str | None = None,
    python: str | None = None,
) -> str:
    """`ImageStore().layer(...)`: a layer in the default store."""
    return await ImageStore().layer(npm=npm, pip=pip, node=node, python=python)
