"""Images of an engine: what they say about programs, building one from a Dockerfile, taking one in.

Nothing is pulled unless the backend was told to: a run that fetches what `latest` means today is not the run of yesterday.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import CommandFailed, ConfigError, SandboxUnavailable, UnknownName
from rollyard.core.sandbox import Resources
from rollyard.images import tars
from rollyard.images.build_context import Context
from rollyard.images.dockerfile import parse
from rollyard.sandbox.docker.container import MARK, ContainerDefaults
from rollyard.sandbox.docker.engine import DockerEngine, EngineRefused

HOST_IMAGE = "rollyard-host:latest"
BUILT = "rollyard-build"
SNAPSHOTS = "rollyard-snapshot"
OURS = (f"{BUILT}:", f"{SNAPSHOTS}:")
_PULL_S = 1800.0
_OF_HOST = ".rollyard"
_NAMES_HOST = re.compile(r"(?mi)^\s*(?:FROM|ARG)\b.*\bhost\b")
_TAIL = 2000


class BuildRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`network` is what RUN commands may reach: none, or what the engine gives by default. `host` is the image that `FROM host`
    means."""

    folder: str
    host: str = HOST_IMAGE
    dockerfile: str = "Dockerfile"
    args: Mapping[str, str] = {}
    target: str | None = None
    network: str = "none"
    resources: Resources = Resources()
    timeout_s: float = 600.0


async def resolve(engine: DockerEngine, image: str, *, pull: bool) -> ContainerDefaults:
    try:
        found = await engine.call("GET", f"images/{image}/json")
    except EngineRefused as refused:
        if refused.status not in (404, 400, 500):
            raise
        if not pull:
            raise UnknownName("image", image, await names(engine), hint=_hint(image)) from None
        await _fetch(engine, image)
        found = await engine.call("GET", f"images/{image}/json")
    config = found.get("Config") or {}
    env = dict(line.partition("=")[::2] for line in config.get("Env") or ())
    return ContainerDefaults(
        image=found["Id"],
        env=env,
        workdir=config.get("WorkingDir") or "",
        user=config.get("User") or "",
        entrypoint=tuple(config.get("Entrypoint") or ()),
        cmd=tuple(config.get("Cmd") or ()),
    )


def _hint(image: str) -> str:
    if image == HOST_IMAGE:
        return f"give an image, or tag the one that `host` shall mean: `docker tag IMAGE {HOST_IMAGE}`"
    return f"`docker pull {image}`, or backend('docker', pull='missing')"


async def names(engine: DockerEngine) -> list[str]:
    found = await engine.call("GET", "images/json")
    return sorted({tag for image in found for tag in image.get("RepoTags") or () if "<none>" not in tag})[:50]


async def _fetch(engine: DockerEngine, image: str) -> None:
    name, colon, tag = image.rpartition(":")
    params = {"fromImage": name, "tag": tag} if colon and "/" not in tag else {"fromImage": image, "tag": "latest"}
    said = await _steps(engine, "images/create", params, None, _PULL_S)
    if problem := next((step["error"] for step in said if "error" in step), None):
        raise SandboxUnavailable(f"image {image!r} could not be pulled: {problem[:300]}")


async def build(engine: DockerEngine, request: BuildRequest) -> str:
    """The name of the image that the folder's Dockerfile gives. The name is by content: the same folder is not built twice,
    and the engine's own cache keeps the steps."""
    root = Path(request.folder)
    if not (root / request.dockerfile).is_file():
        raise ConfigError(f"there is no {request.dockerfile} in {request.folder!r}")
    context = await asyncio.to_thread(Context(root, request.dockerfile).pack)
    dockerfile = await _put_host(engine, request, context)
    identity = json.dumps([sorted(request.args.items()), request.target, request.dockerfile, request.network]).encode()
    name = f"{BUILT}:{hashlib.sha256(context.getbuffer().tobytes() + identity).hexdigest()[:32]}"
    try:
        await engine.call("GET", f"images/{name}/json")
        return name
    except EngineRefused as refused:
        if refused.status != 404:
            raise
    params: dict[str, Any] = {
        "t": name,
        "dockerfile": dockerfile,
        "buildargs": dict(request.args),
        "labels": {MARK: ""},
        "networkmode": "none" if request.network == "none" else "default",
        "rm": True,
        "forcerm": True,
    }
    if request.target is not None:
        params["target"] = request.target
    if request.resources.memory_mb is not None:
        params["memory"] = request.resources.memory_mb * 2**20
    said = await _steps(engine, "build", params, context, request.timeout_s)
    log = "".join(str(step.get("stream", "")) for step in said)
    if problem := next((str(step["error"]) for step in said if "error" in step), None):
        raise CommandFailed(
            f"{root / request.dockerfile}: {problem[:300]}\n{log[-_TAIL:].strip()}", exit_code=None, stdout=log[-_TAIL:]
        )
    return name


async def _put_host(engine: DockerEngine, request: BuildRequest, context: io.BytesIO) -> str:
    """The Dockerfile to build: one whose stages begin `FROM host` is written anew into the context with the image that `host`
    means, by its id, so that another image of that name is another build."""
    text = (Path(request.folder) / request.dockerfile).read_text()
    if not _NAMES_HOST.search(text):  # the engine's builder knows more than our reader of Dockerfiles
        return request.dockerfile
    lines = text.splitlines(keepends=True)
    plan = parse(text, file=str(Path(request.folder) / request.dockerfile), args=request.args)
    stages = [stage for stage in plan.stages if stage.base == "host"]
    if not stages:
        return request.dockerfile
    meant = (await resolve(engine, request.host, pull=False)).image
    for stage in stages:
        lines[stage.line - 1] = f"FROM {meant.removeprefix('sha256:')}{f' AS {stage.name}' if stage.name else ''}\n"
    member = tarfile.TarInfo(f"{request.dockerfile}{_OF_HOST}")
    data = "".join(lines).encode()
    member.size = len(data)
    context.seek(0)
    with tarfile.open(fileobj=context, mode="a") as archive:
        archive.addfile(member, io.BytesIO(data))
    return member.name


async def remove(engine: DockerEngine, image: str) -> None:
    if not image.startswith(OURS):
        raise ConfigError(
            f"{image!r} was not made here, so it is not removed", hint="remove it with the engine's own tools"
        )
    try:
        await engine.call("DELETE", f"images/{image}", params={"force": True})
    except EngineRefused as refused:
        if refused.status != 404:
            raise


async def load(engine: DockerEngine, tar: Path, name: str) -> None:
    """Take in a root file system as an image of this name."""
    repo, _, tag = name.partition(":")
    async with tars.pipe_chunks(lambda out: _copy(tar, out)) as chunks:
        params = {"fromSrc": "-", "repo": repo, "tag": tag or "latest"}
        async with engine.request(
            "POST",
            "images/create",
            params=params,
            data=chunks,
            headers={"Content-Type": "application/x-tar"},
            timeout=600,
        ) as said:
            text = (await said.read()).decode("utf-8", "replace")
    if '"error"' in text:
        raise ConfigError(f"{tar} could not be taken in: {text[-300:]}")


def _copy(source: Path, out: Any) -> None:
    with source.open("rb") as file:
        while data := file.read(tars.CHUNK):
            out.write(data)


async def _steps(
    engine: DockerEngine, path: str, params: Mapping[str, Any], data: io.BytesIO | None, timeout: float
) -> list[dict[str, Any]]:
    """What an engine says while it works, line by line; a failure is one of the lines."""
    headers = {"Content-Type": "application/x-tar"}
    body = data.getvalue() if data is not None else None
    async with engine.request("POST", path, params=params, data=body, headers=headers, timeout=timeout) as said:
        text = await said.read()
    return [json.loads(line) for line in text.splitlines() if line.strip().startswith(b"{")]
