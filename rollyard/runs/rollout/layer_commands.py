"""Layers that are made in a sandbox: by commands, run once, so that a program in any language can be an agent's; and of packages
whose author is not trusted, which are installed there.

What is compiled there needs to find its files from where it lies: the layer's final place is named by its contents.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio.to_thread

from rollyard.core.agent import LayerSpec
from rollyard.core.errors import CommandFailed
from rollyard.core.limits import Deadline
from rollyard.core.protocols import Backend
from rollyard.core.sandbox import Exit, SandboxSpec
from rollyard.core.scratch import scratch
from rollyard.images.layers import BUILD_TIMEOUT_S, copy_source
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
                _refuse_failure(repr(command), done)
            await box.download_dir(OUTPUT, str(made), max_bytes=_MOST_BYTES)
        layer = await images.build_layer(LayerSpec(folder=str(made)))
    images.layers.remember(spec, layer)
    return layer


async def run_apart(
    backend: Backend,
    folders: Sequence[Path],
    commands: Sequence[Sequence[str]],
    *,
    env: Mapping[str, str],
    what: str,
    timeout: float = BUILD_TIMEOUT_S,
) -> None:
    """An `images.packages.SandboxRun`: without a network, and without a variable of the host but those of `env`."""
    first = folders[0]
    with scratch("apart") as made:
        async with backend.open(SandboxSpec(labels={"rollyard.role": "layer"}, ttl_s=timeout + 60)) as box:
            for folder in folders:
                if not await box.exists(str(folder)):
                    await box.upload_dir(str(folder), str(folder))
            for command in commands:
                _refuse_failure(what, await box.exec(command, cwd="/", env=env, timeout=timeout))
            await box.kill_processes()
            await box.download_dir(str(first), str(made / "first"), max_bytes=_MOST_BYTES)
        await anyio.to_thread.run_sync(_replace, made / "first", first)


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target)
    shutil.move(source, target)


def _refuse_failure(what: str, done: Exit) -> None:
    if done.ok:
        return
    how = "ran out of time" if done.timed_out else f"ended with exit code {done.exit_code}"
    stdout, stderr = (text.decode("utf-8", "backslashreplace")[-_SHOWN:] for text in (done.stdout, done.stderr))
    raise CommandFailed(
        f"{what} {how}: {done.text.strip()[-400:]}", exit_code=done.exit_code, stdout=stdout, stderr=stderr
    )
