"""A task's compose file: the services beside `main`, where the agent works.

`main` itself is folded into the task's own place. A file that says nothing else is only another way to write an image; of any
other one the services are read when the task runs. What is not in `SERVICE_KEYS` and `MAIN_KEYS` is refused by its name: nothing
of a file is ever ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import yaml

from rollyard.core.errors import ConfigError, Error, Unsupported
from rollyard.core.sandbox import Resources, Volume, is_path
from rollyard.core.task import Healthcheck, Site
from rollyard.tasks.harbor.compose_values import (
    SEE,
    read_healthcheck,
    read_megabytes,
    read_text,
    read_value,
    read_volume,
    read_words,
    refuse_unknown,
)

MAIN = "main"
FILE_KEYS: Mapping[str, str] = {
    "services": "`main` and those beside it",
    "volumes": "names of volumes, without settings",
    "version": "no effect, as in Compose",
    "name": "no effect: every rollout has services of its own",
}
SERVICE_KEYS: Mapping[str, str] = {
    "image": "an image that the backend has",
    "build": "a folder below the compose file's, with a `Dockerfile`; or `context` with it",
    "command": "in place of the image's CMD; a string is split into words, without a shell",
    "entrypoint": "in place of the image's ENTRYPOINT and CMD",
    "environment": "a mapping, or a list of name=value; a whole value may be `${VAR}` or `${VAR:-default}`",
    "working_dir": "where its command runs",
    "user": "who runs its command",
    "depends_on": "a list, or `condition`: `service_started`, `service_healthy` or `service_completed_successfully`",
    "healthcheck": "`test`, `interval`, `timeout`, `retries`, `start_period`, `start_interval`, `disable`",
    "volumes": "`name:/path` or `name:/path:ro`; folders of the machine are refused",
    "expose": "no effect: services reach each other on every port, and nothing else does",
    "hostname": "another name for it",
    "cpus": "a limit",
    "mem_limit": "a limit, such as `512m`",
    "x-rollyard": "`verify`: `keep` (it runs during the tests, the default) or `stop` (it is ended before them)",
}
MAIN_KEYS = ("image", "build", "command", "environment", "working_dir", "depends_on", "volumes", "expose", "hostname")
_FOLDED = {"build", "image", "environment", "working_dir", "command"}
_HARMLESS = {"version", "name"}
_MAX_VALUES = 100_000
_PLAIN = (str, int, float, bool, type(None), date)  # what one line says; aliases could make a list of lists without end
_CONDITIONS = ("service_started", "service_healthy", "service_completed_successfully")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")

# What only keeps a container up, which a sandbox does by itself.
_IDLE = (("sleep", "infinity"), ("tail", "-f", "/dev/null"), ("sh",), ("bash",), ("/bin/sh",), ("/bin/bash",))
_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")

Condition = Literal["service_started", "service_healthy", "service_completed_successfully"]


class TaskService(msgspec.Struct, frozen=True, kw_only=True):
    """One service of a task. `command` and `entrypoint` are None where the image's own count. `main` has a command where the file
    gives it one that does more than wait."""

    name: str
    image: str = "host"
    build: str | None = None
    command: tuple[str, ...] | None = None
    entrypoint: tuple[str, ...] | None = None
    env: Mapping[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    depends_on: Mapping[str, Condition] = {}
    healthcheck: Healthcheck | None = None
    volumes: tuple[Volume, ...] = ()
    hostname: str | None = None
    resources: Resources = Resources()
    verify: Literal["keep", "stop"] = "keep"


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """`main` is what the file says of the agent's place beyond the image; `others` come in the order in which they start."""

    main: TaskService
    others: tuple[TaskService, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What services are reached by."""
        every = [name for one in (self.main, *self.others) for name in (one.name, one.hostname) if name is not None]
        return tuple(dict.fromkeys(every))

    @property
    def kept(self) -> tuple[str, ...]:
        """Those that live while the tests run."""
        return tuple(one.name for one in self.others if one.verify == "keep")


def fold(site: Site) -> Site:
    """The site with what the file says of `main`'s image, and without the file where that is all that it says."""
    if site.compose is None:
        return site
    path = Path(site.compose)
    document = _load(path)
    services = document["services"]
    main: Any = services[MAIN] or {}
    if not isinstance(main, dict):
        raise ConfigError(f"{path}: services.main: not a mapping")
    said = cast("dict[str, Any]", main)
    for name in ("image", "working_dir"):
        if not isinstance(said.get(name) or "", str):
            raise ConfigError(f"{path}: services.main.{name}: a text")
    alone = not set(document) - _HARMLESS - {"services"} and set(services) == {MAIN}
    plain = alone and not set(said) - _FOLDED and _is_idle(said.get("command"))
    build = _find_build(said, path)
    if build is None and "build" in said:
        return site
    return msgspec.structs.replace(
        site,
        compose=None if plain else site.compose,
        build=build if build is not None else site.build,
        image=str(said["image"]) if "image" in said and build is None else site.image,
        env={**_environment(said.get("environment"), f"{path}: services.main"), **site.env},
        workdir=site.workdir or said.get("working_dir"),
    )


def _is_idle(command: Any) -> bool:
    """Whether a command of `main` does nothing that a sandbox does not do by itself."""
    try:
        words = read_words(command, "command")
        if words is not None and len(words) == 3 and words[0] in _SHELLS and words[1] == "-c":
            words = read_words(words[2], "command")
    except Error:
        return False  # told where the services are read
    return words is None or words in _IDLE


def _load(path: Path) -> dict[str, Any]:
    try:
        document: Any = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    services: Any = cast("dict[str, Any]", document).get("services") if isinstance(document, dict) else None
    if not isinstance(services, dict) or MAIN not in services:
        raise ConfigError(f"{path}: services: there is no service named 'main' for the agent")
    if not _is_bounded(document):
        raise ConfigError(f"{path}: its aliases make it larger than {_MAX_VALUES:,} values")
    return cast("dict[str, Any]", document)


def _is_bounded(document: Any) -> bool:
    """A few lines of aliases of aliases are more values than a memory holds, once they are expanded."""
    left, waiting = _MAX_VALUES, [document]
    while waiting and left > 0:
        value = waiting.pop()
        left -= 1
        if isinstance(value, dict):
            found = cast("dict[Any, Any]", value)
            waiting += [*found, *found.values()]
        elif isinstance(value, list | tuple):
            waiting += cast("list[Any]", value)
    return left > 0


def _find_build(said: Mapping[str, Any], path: Path) -> str | None:
    """The folder to build, when it is said the plain way; `${CONTEXT_DIR}` is the environment folder."""
    build = said.get("build")
    if isinstance(build, Mapping) and set(cast("Mapping[str, Any]", build)) <= {"context"}:
        build = cast("Mapping[str, Any]", build).get("context", ".")
    if not isinstance(build, str):
        return None
    try:
        folder = (path.parent / build.replace("${CONTEXT_DIR}", ".")).resolve()
        inside = folder.is_relative_to(path.parent.resolve())
        return str(folder) if inside and (folder / "Dockerfile").is_file() else None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, links in a circle
        raise ConfigError(f"{path}: services.main.build names no folder: {error}") from error


def _environment(said: Any, where: str) -> dict[str, str]:
    if said is None:
        return {}
    if isinstance(said, Mapping) and all(isinstance(v, _PLAIN) for v in cast("Mapping[Any, Any]", said).values()):
        return {str(k): "" if v is None else str(v) for k, v in cast("Mapping[Any, Any]", said).items()}
    if isinstance(said, list) and all(isinstance(item, str) and "=" in item for item in cast("list[Any]", said)):
        return dict(item.split("=", 1) for item in cast("list[str]", said))
    raise ConfigError(f"{where}.environment: a mapping, or a list of name=value")


def read_services(compose: str) -> Services:
    """The services of a compose file. Raises for the first thing in it that a task cannot have here, by its name."""
    path = Path(compose)
    try:
        return _read_services(path, _load(path))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: a value is of another kind than its key takes: {error}", hint=SEE) from error


def _read_services(path: Path, document: dict[str, Any]) -> Services:
    refuse_unknown(document, FILE_KEYS, str(path))
    known = _volume_names(document.get("volumes"), path)
    found: dict[str, TaskService] = {}
    for name, said in cast("dict[Any, Any]", document["services"]).items():
        where = f"{path}: services.{name}"
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "localhost":
            raise ConfigError(f"{where}: {name!r} is no name of a service")
        if not isinstance(said, dict) and not (said is None and name == MAIN):
            raise ConfigError(f"{where}: not a mapping")
        found[name] = _read_service(name, cast("dict[str, Any]", said or {}), where, path, known)
    _check_dependencies(found, path)
    main = found.pop(MAIN)
    return Services(main=main, others=tuple(_in_order(found)))


def _volume_names(said: Any, path: Path) -> set[str]:
    if said is None:
        return set()
    if not isinstance(said, dict):
        raise ConfigError(f"{path}: volumes: not a mapping")
    volumes = cast("dict[str, Any]", said)
    for name, settings in volumes.items():
        refuse_unknown(settings or {}, (), f"{path}: volumes.{name}")
    return set(volumes)


def _read_service(name: str, said: dict[str, Any], where: str, path: Path, known: set[str]) -> TaskService:
    refuse_unknown(said, MAIN_KEYS if name == MAIN else SERVICE_KEYS, where)
    build = _find_build(said, path)
    if "build" in said and build is None:
        raise Unsupported(f"{where}.build: not a folder below {path.parent} with a Dockerfile", hint=SEE)
    image = read_text(said.get("image", "host"), f"{where}.image")
    if is_path(image):
        raise ConfigError(f"{where}.image: {image!r} is a path of the machine; an image has a name")
    own: Any = said.get("x-rollyard") or {}
    refuse_unknown(own, ("verify",), f"{where}.x-rollyard")
    verify = own.get("verify", "keep")
    if verify not in ("keep", "stop"):
        raise ConfigError(f"{where}.x-rollyard.verify is 'keep' or 'stop', got {verify!r}")
    return TaskService(
        name=name,
        image=image,
        build=build,
        command=None
        if name == MAIN and _is_idle(said.get("command"))
        else read_words(said.get("command"), f"{where}.command"),
        entrypoint=read_words(said.get("entrypoint"), f"{where}.entrypoint"),
        env={
            k: read_value(v, f"{where}.environment.{k}")
            for k, v in _environment(said.get("environment"), where).items()
        },
        workdir=None if "working_dir" not in said else read_text(said["working_dir"], f"{where}.working_dir"),
        user=None if "user" not in said else read_text(said["user"], f"{where}.user"),
        depends_on=dict(_dependencies(said.get("depends_on"), where)),
        healthcheck=read_healthcheck(said.get("healthcheck"), f"{where}.healthcheck"),
        volumes=tuple(read_volume(one, f"{where}.volumes", known) for one in said.get("volumes") or ()),
        hostname=None if "hostname" not in said else read_text(said["hostname"], f"{where}.hostname"),
        resources=Resources(
            cpus=float(said["cpus"]) if "cpus" in said else None,
            memory_mb=read_megabytes(said["mem_limit"], f"{where}.mem_limit") if "mem_limit" in said else None,
        ),
        verify=verify,
    )


def _dependencies(said: Any, where: str) -> Iterator[tuple[str, Condition]]:
    if isinstance(said, list):
        said = {str(name): {} for name in cast("list[Any]", said)}
    for name, settings in cast("dict[str, Any]", said or {}).items():
        refuse_unknown(settings or {}, ("condition",), f"{where}.depends_on.{name}")
        condition = (settings or {}).get("condition", "service_started")
        if condition not in _CONDITIONS:
            raise Unsupported(f"{where}.depends_on.{name}.condition: {condition!r}", hint=f"one of {_CONDITIONS}")
        yield name, condition


def _check_dependencies(found: Mapping[str, TaskService], path: Path) -> None:
    for service in found.values():
        for name, condition in service.depends_on.items():
            where = f"{path}: services.{service.name}.depends_on.{name}"
            if name not in found or name == MAIN:
                raise Unsupported(f"{where}: {'it starts last' if name == MAIN else 'there is no such service'}")
            if condition == "service_healthy" and found[name].healthcheck is None:
                raise ConfigError(f"{where}: service_healthy, and {name!r} has no healthcheck")


def _in_order(found: Mapping[str, TaskService]) -> Iterator[TaskService]:
    """Each after those that it depends on."""
    waiting = dict(found)
    while waiting:
        ready = [one for one in waiting.values() if not set(one.depends_on) & set(waiting)]
        if not ready:
            raise ConfigError(f"services depend on each other in a circle: {', '.join(waiting)}")
        for one in ready:
            del waiting[one.name]
            yield one
