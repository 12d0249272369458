"""The image store: turns the name of an image and the ids of layers into a `Rootfs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import msgspec

from rollyard.core.errors import UnknownName
from rollyard.sandbox.home import data_home, private_dir
from rollyard.sandbox.host import host_rootfs
from rollyard.sandbox.rootfs import Rootfs


class ImageStore:
    """One directory of images, layers and snapshots. Everything in it is immutable once it has its name."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = private_dir(root or data_home())

    async def resolve(self, image: str = "host", layers: Sequence[str] = ()) -> Rootfs:
        """What to mount for `image` with `layers` on top, lowest first."""
        if image == "host":
            base = await anyio.to_thread.run_sync(host_rootfs, self.root)
        else:
            raise UnknownName("image", image, ["host"], hint="add it with `rollyard image add SOURCE --name NAME`")
        trees = tuple(str(self.layer_tree(layer)) for layer in reversed(layers))
        return msgspec.structs.replace(base, lowers=(*trees, *base.lowers))

    def layer_tree(self, layer_id: str) -> Path:
        """The directory of one layer, rooted at `/`."""
        tree = self.root / "layers" / layer_id / "root"
        if not tree.is_dir():
            known = sorted(path.name for path in (self.root / "layers").glob("*") if not path.name.startswith("."))
            raise UnknownName("layer", layer_id, known, hint="build it with `ry.layer(pip=[...], npm=[...])`")
        return tree
