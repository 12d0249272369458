"""A layer that commands make: run once in a sandbox of their own, so that a program in any language can be an agent's.

What is compiled there needs to find its files from where it lies: the layer's final place is named by its contents.
"""

from __future__ import annotations

import anyio.to_thread

from rollyard.core.agent import LayerSpec
from rollyard.core.errors import CommandFailed
from rollyard.core.limits import Deadline
from rollyard.core.protocols import Backend
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.scratch import scratch
from rollyard.images.layers import copy_source
from rollyard.images.store import ImageStore

SOURCE, OUTPUT = "/src", "/opt/rollyard-layer"
_MOST_BYTES = 4 * 2**30
_SHOWN = 4000


async def layer_by_commands(spec: LayerSpec, backend: Backend, images: ImageStore, deadline: Deadline) -> str:
    """The id of the layer; found again by the commands and what they work on."""
    if (known := images.layers.find(spec)) is not None:
        return known
    with scratch("layer") as folder:
        source, made = folder / "source", folder / "made"
        source.mkdir()
        made.mkdir()
        if spec.folder is not None or spec.archive is not None:
            await anyio.to_thread.run_sync(copy_source, spec, source)
        place = SandboxSpec(image=spec.build_image, labels={"rollyard.role": "layer"}, ttl_s=deadline.left + 60)
        async with backend.open(place) as box:
            await box.mkdir(OUTPUT)
            await box.upload_dir(str(source), SOURCE)
            for command in spec.commands:
                done = await box.exec(command, cwd=SOURCE, env={"PREFIX": OUTPUT}, timeout=max(0.1, deadline.left - 1))
                if not done.ok:
                    said = done.text.strip()[-400:]
                    how = "ran out of time" if done.timed_out else f"ended with exit code {done.exit_code}"
                    stdout, stderr = (
                        text.decode("utf-8", "backslashreplace")[-_SHOWN:] for text in (done.stdout, done.stderr)
                    )
                    raise CommandFailed(
                        f"{command!r} {how}: {said}", exit_code=done.exit_code, stdout=stdout, stderr=stderr
                    )
            await box.download_dir(OUTPUT, str(made), max_bytes=_MOST_BYTES)
        layer = await images.build_layer(LayerSpec(folder=str(made)))
    images.layers.remember(spec, layer)
    return layer
