"""Images of environments for the local engine: a layer with packages, and a folder on top of it."""

from rollyard.core.sandbox import SandboxSpec
from rollyard.sandbox.images import ImageStore
from rollyard.sandbox.local.backend import LocalBackend


async def image_of(folder, *pip):
    """The id of an image with these packages and the folder at /env, and the packages' Python."""
    store = ImageStore()
    layer = await store.layer(pip=pip)
    async with LocalBackend() as backend, backend.open(SandboxSpec(layers=(layer,))) as box:
        await box.upload_dir(str(folder), "/env")
        return await box.snapshot(), f"{store.layer_record(layer).prefix}/bin/python"
