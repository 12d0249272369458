"""A compose file with one service is only another way to write an image: `main` is folded into the task's own place.

Anything that a single sandbox cannot be (another service, a volume, a port, a health condition) leaves the file as it is, and a
backend without compose refuses the task by name. Nothing of it is ever ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from rollyard.core.errors import ConfigError
from rollyard.core.task import Site

_FOLDED = {"build", "image", "environment", "working_dir", "command"}
_HARMLESS = {"version", "name"}
_PLAIN = (str, int, float, bool, type(None), date)  # what one line says; aliases could make a list of lists without end


def fold(site: Site) -> Site:
    """The site without its compose file, where that file says nothing that is lost."""
    if site.compose is None:
        return site
    path = Path(site.compose)
    try:
        document: Any = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    services = document.get("services") if isinstance(document, dict) else None
    if not isinstance(services, dict) or "main" not in services:
        raise ConfigError(f"{path}: services: there is no service named 'main' for the agent")
    if set(cast("dict[str, Any]", document)) - _HARMLESS - {"services"} or set(cast("dict[str, Any]", services)) != {
        "main"
    }:
        return site
    main: Any = services["main"] or {}
    if not isinstance(main, dict) or set(cast("dict[str, Any]", main)) - _FOLDED:
        return site
    for name in ("image", "working_dir"):
        if not isinstance(main.get(name) or "", str):
            raise ConfigError(f"{path}: services.main.{name}: a text")
    build = _build(cast("dict[str, Any]", main), path)
    if build is None and "build" in main:
        return site
    return msgspec.structs.replace(
        site,
        compose=None,
        build=build if build is not None else site.build,
        image=str(main["image"]) if "image" in main and build is None else site.image,
        env={**_environment(main.get("environment"), path), **site.env},
        workdir=site.workdir or main.get("working_dir"),
    )


def _build(main: Mapping[str, Any], path: Path) -> str | None:
    """The folder to build, when it is said the plain way; `${CONTEXT_DIR}` is the environment folder."""
    said = main.get("build")
    if isinstance(said, Mapping) and set(cast("Mapping[str, Any]", said)) <= {"context"}:
        said = cast("Mapping[str, Any]", said).get("context", ".")
    if not isinstance(said, str):
        return None
    try:
        folder = (path.parent / said.replace("${CONTEXT_DIR}", ".")).resolve()
        return str(folder) if (folder / "Dockerfile").is_file() else None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, links in a circle
        raise ConfigError(f"{path}: services.main.build names no folder: {error}") from error


def _environment(said: Any, path: Path) -> dict[str, str]:
    if said is None:
        return {}
    if isinstance(said, Mapping) and all(isinstance(v, _PLAIN) for v in cast("Mapping[Any, Any]", said).values()):
        return {str(k): "" if v is None else str(v) for k, v in cast("Mapping[Any, Any]", said).items()}
    if isinstance(said, list) and all(isinstance(item, str) and "=" in item for item in cast("list[Any]", said)):
        return dict(item.split("=", 1) for item in cast("list[str]", said))
    raise ConfigError(f"{path}: services.main.environment: a mapping, or a list of name=value")
