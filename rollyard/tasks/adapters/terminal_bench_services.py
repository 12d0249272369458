"""The compose file of a Terminal-Bench 1 task as a task's `environment/docker-compose.yaml`.

What the benchmark's own harness put there is left out (names of containers, folders for its logs, `${T_BENCH_...}`), and so are
published ports and networks: services of a task share one network already. A file of the task that a service mounts is copied
into that service's image. Any other key stays, and is refused by its name where a task cannot have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

from rollyard.core.errors import ConfigError

# The harness gives this name to the container that the agent works in
_AGENT = "T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME"
_HARNESS = "${T_BENCH"
_NO_EFFECT = ("container_name", "ports", "networks", "links", "platform", "stdin_open", "tty")
_PLAIN = {"build": ".", "command": ["sh", "-c", "sleep infinity"]}  # the task's own Dockerfile, and nothing else

Files = dict[str, str | bytes]


def translate(compose: Mapping[str, Any], environment: Mapping[str, str | bytes]) -> Files:
    """The compose file, where it says more than which Dockerfile, and the build folders that services need beside the task's."""
    made: Files = {}
    services: dict[str, Any] = {}
    for name, said in compose["services"].items():
        if not isinstance(said, dict):
            raise ConfigError(f"docker-compose.yaml: services.{name}: not a mapping")
        kept = {key: value for key, value in said.items() if key not in _NO_EFFECT and not _is_harness(value)}
        for key in ("environment", "volumes"):
            if isinstance(kept.get(key), list):
                kept[key] = [item for item in kept[key] if not _is_harness(item)]
        if linked := said.get("links"):
            kept.setdefault("depends_on", [str(link).partition(":")[0] for link in linked])
        mounts = [str(item) for item in kept.get("volumes") or () if str(item).startswith((".", "/"))]
        if "volumes" in kept:
            kept["volumes"] = [item for item in kept["volumes"] if str(item) not in mounts]
        folder, files = _build(name, kept, [mount for mount in mounts if mount.startswith(".")], environment)
        made |= files
        if folder is not None:
            kept = {**kept, "build": folder}
            kept.pop("image", None)
        kept = {key: value for key, value in kept.items() if value != []}
        services["main" if _AGENT in str(said.get("container_name")) else str(name)] = kept
    if services == {"main": _PLAIN}:
        return {}
    volumes = {str(name): None for name in compose.get("volumes") or ()}
    whole = {"services": services, **({"volumes": volumes} if volumes else {})}
    return {**made, "docker-compose.yaml": yaml.safe_dump(whole)}


def _is_harness(value: Any) -> bool:
    return isinstance(value, str) and _HARNESS in value


def _build(
    name: str, said: Mapping[str, Any], mounts: list[str], environment: Mapping[str, str | bytes]
) -> tuple[str | None, Files]:
    """The service's build folder, and its files where it is none of the task's own: with another Dockerfile, or with mounts."""
    build = said.get("build")
    if build is None and not mounts:
        return None, {}
    settings: dict[str, Any] = build if isinstance(build, dict) else {"context": build or "."}
    context, file = _path_inside(settings.get("context", ".")), str(settings.get("dockerfile", "Dockerfile"))
    if set(settings) - {"context", "dockerfile"}:
        raise ConfigError(f"docker-compose.yaml: services.{name}.build: only context and dockerfile are understood")
    if build is not None and file == "Dockerfile" and not mounts:
        return context, {}
    if build is None:
        dockerfile, files = f"FROM {said.get('image')}\n", {}
    else:
        files = {path: data for path, data in environment.items() if context == "." or path.startswith(f"{context}/")}
        files = {path.removeprefix(f"{context}/"): data for path, data in files.items()}
        if file not in files:
            raise ConfigError(f"docker-compose.yaml: services.{name}.build: there is no {file}")
        found = files[file]
        dockerfile = found if isinstance(found, str) else found.decode()
    for mount in mounts:
        host, _, inside = mount.partition(":")
        place, inside = _path_inside(host), inside.partition(":")[0]
        copied = {
            path: data for path, data in environment.items() if place in (".", path) or path.startswith(f"{place}/")
        }
        if not copied:
            raise ConfigError(f"docker-compose.yaml: services.{name}.volumes: there is no {host}")
        files = {**files, **{f"mounted/{path}": data for path, data in copied.items()}}
        source = f"mounted/{place}" if place in environment else f"mounted/{'' if place == '.' else f'{place}/'}"
        dockerfile = f"{dockerfile.rstrip()}\nCOPY {source} {inside}{'' if place in environment else '/'}\n"
    folder = f"services/{name}"
    return folder, {f"{folder}/{path}": data for path, data in {**files, "Dockerfile": dockerfile}.items()}


def _path_inside(path: Any) -> str:
    return PurePosixPath(str(path)).as_posix() if str(path) not in ("./", ".") else "."
