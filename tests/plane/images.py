"""Images of environments for the local engine: a folder at /env, on a layer with packages or on nothing but the host's Python."""

from importlib import resources

from rollyard.core.sandbox import SandboxSpec
from rollyard.images.store import ImageStore
from rollyard.sandbox.local.backend import LocalBackend


async def image_of(folder, *pip):
    """The id of an image with these packages and the folder, and the packages' Python."""
    store = ImageStore()
    layer = await store.layer(pip=pip)
    async with LocalBackend() as backend, backend.open(SandboxSpec(layers=(layer,))) as box:
        await box.upload_dir(str(folder), "/env")
        return await box.snapshot(), f"{store.layer_record(layer).prefix}/bin/python"


async def plain_image(project):
    """The id of an image with a file and the server that needs no package."""
    async with LocalBackend() as backend, backend.open(SandboxSpec()) as box:
        for name in ("plain_env.py", "plain_mcp.py"):
            await box.write(f"/env/{name}", resources.files("rollyard.inside").joinpath(name).read_bytes())
        await box.write("/env/project.py", project.read_bytes())
        return await box.snapshot()


PLAIN_START = ["python3", "/env/plain_env.py", "/env/project.py", "--port", "8081"]
