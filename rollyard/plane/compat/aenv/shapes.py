"""Environments and instances as AEnvironment writes them, and back.

What a pushed project says is kept whole under `extra["aenv"]`, so that it comes back as it was sent; the plane's own fields are
read out of it. `deployConfig` may say what AEnvironment does not know: `engine`, `network`, and `start`, the program of an
instance as a list. Where the code of a project lies (`codeUrl`) is the client's business and never fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from rollyard.core.errors import PlaneInvalid
from rollyard.core.plane import AENV_SERVER, DATA_PORT, EnvBuild, EnvRecord, EnvSpec, Instance
from rollyard.core.sandbox import Resources
from rollyard.plane.compat.aenv.envelope import duration, seconds
from rollyard.plane.http.quantities import cores, megabytes
from rollyard.plane.service.projects import PushedFiles
from rollyard.plane.service.shapes import rfc3339

KEPT = "aenv"
OWNER_LABEL = "owner"
_FIELDS = ("description", "tags", "status", "codeUrl", "artifacts", "buildConfig", "testConfig", "deployConfig")
_STATUS = {"Init": 0, "Pending": 1, "Creating": 2, "Created": 3, "Testing": 4, "Verified": 5, "Ready": 6, "Failed": 8}
_RELEASED = 7
_STATES = {"creating": "Creating", "running": "Running", "paused": "Running", "failed": "Failed"}


def spec_of(body: Mapping[str, Any], before: EnvSpec | None = None) -> EnvSpec:
    """A pushed project; over `before`, what is given replaces and the rest stays."""
    old = before or EnvSpec()
    kept: dict[str, Any] = dict(old.extra.get(KEPT) or {})
    kept.update({name: body[name] for name in _FIELDS if body.get(name) is not None})
    deploy: Mapping[str, Any] = kept.get("deployConfig") or {}
    template = deploy.get("arcaTemplateId")
    fields = {
        "description": kept.get("description") or "",
        "tags": kept.get("tags") or (),
        "image": template or _image(kept.get("artifacts")),
        "engine": deploy.get("engine") or ("arca" if template else None),
        "resources": Resources() if template else _resources(deploy),
        "network": deploy.get("network") or ("host" if template else "none"),
        "env": {name: str(value) for name, value in (deploy.get("environmentVariables") or {}).items()},
        "start": deploy.get("start") or (),
        "port": deploy.get("port") or DATA_PORT,
        "ttl_s": seconds(str(deploy.get("ttl") or "")),
        "extra": {**old.extra, KEPT: kept},
    }
    try:
        return msgspec.convert({**msgspec.to_builtins(old), **msgspec.to_builtins(fields)}, EnvSpec)
    except msgspec.ValidationError as error:
        raise PlaneInvalid(f"the project's description is not one: {error}") from error


def with_files(spec: EnvSpec, files: PushedFiles | None) -> EnvSpec:
    """The image of a project that names none, or one that the plane does not have, comes from the files that were sent for it."""
    kept: Mapping[str, Any] = spec.extra.get(KEPT) or {}
    dockerfile = str((kept.get("buildConfig") or {}).get("dockerfile") or "").removeprefix("./") or None
    if files is None or (spec.image != "host" and dockerfile is None):
        return spec
    build = EnvBuild(bundle=files.sha256, context=files.context, dockerfile=dockerfile, start=AENV_SERVER)
    return replace(spec, build=build, artifacts={**spec.artifacts, "bundle": files.sha256})


def check_runnable(record: EnvRecord) -> None:
    """A pushed project without an image would be an empty machine, which its client waits for in vain."""
    kept: Mapping[str, Any] | None = record.spec.extra.get(KEPT)
    if kept is None or record.spec.image != "host" or record.spec.build is not None or record.spec.start:
        return
    where = f"; its client keeps them at {kept['codeUrl']}" if kept.get("codeUrl") else ""
    raise PlaneInvalid(
        f"{record.id} has no image, and its files were not sent here{where}",
        hint="set storage_config.type of the aenv command line to aenv_hub and push again, use `rollyard push FOLDER`, or name "
        "an artifact of type image in config.json",
    )


def _image(artifacts: Any) -> str:
    for artifact in artifacts if isinstance(artifacts, list) else ():
        if isinstance(artifact, dict) and artifact.get("type") in ("image", "docker-image") and artifact.get("content"):
            return str(artifact["content"])
    return "host"


def _resources(deploy: Mapping[str, Any]) -> Resources:
    return Resources(
        cpus=cores(deploy.get("cpu")),
        memory_mb=megabytes(deploy.get("memory")),
        disk_mb=megabytes(deploy.get("ephemeralStorage")),
    )


def env_shape(record: EnvRecord) -> dict[str, Any]:
    kept: Mapping[str, Any] = record.spec.extra.get(KEPT) or {}
    image = [] if record.spec.image == "host" else [{"type": "image", "content": record.spec.image}]
    status = kept.get("status", "Ready")
    return {
        "id": f"{record.name}-{record.version}",
        "name": record.name,
        "version": record.version,
        "description": record.spec.description,
        "tags": list(record.spec.tags),
        "code_url": kept.get("codeUrl") or "",
        "status": _RELEASED if record.status == "released" else _STATUS.get(status, 6),
        "artifacts": kept.get("artifacts") or image,
        "build_config": kept.get("buildConfig") or {},
        "test_config": kept.get("testConfig") or {},
        "deploy_config": kept.get("deployConfig") or {},
        "created_at": rfc3339(record.created_at),
        "updated_at": rfc3339(record.updated_at),
    }


def status_word(record: EnvRecord) -> str:
    kept: Mapping[str, Any] = record.spec.extra.get(KEPT) or {}
    return "Released" if record.status == "released" else str(kept.get("status", "Ready"))


def instance_shape(instance: Instance, record: EnvRecord | None, host: str) -> dict[str, Any]:
    """`ip` is what the client sends back to the data port: the instance's token there, in the form of a host's name."""
    state = _STATES.get(instance.state, "Terminated")
    return {
        "id": instance.id,
        "env": None if record is None else env_shape(record),
        "status": state,
        "created_at": rfc3339(instance.created_at),
        "updated_at": rfc3339(instance.updated_at),
        "ip": host if state == "Running" else "",
        "ttl": duration(instance.plan.ttl_s),
        "owner": instance.labels.get(OWNER_LABEL, instance.owner),
        "labels": {**instance.labels, "engine": instance.engine},
    }
