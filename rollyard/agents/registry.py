"""Names to agents. A name is an entry point of the group `rollyard.agents`, a dotted path (`package.module:agent`), or the
path of a TOML file, which says in data what a Python file says in code."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rollyard.core import registry
from rollyard.core.agent import Agent
from rollyard.core.errors import ConfigError

GROUP = "rollyard.agents"


def names() -> list[str]:
    return registry.names(GROUP)


def get(name: str | Agent) -> Agent:
    """`pi`, `my_package.agents:mine`, `./my-agent.toml`, or an `Agent` as it is."""
    if isinstance(name, Agent):
        return name
    if name.endswith(".toml"):
        return from_toml(Path(name))
    found = registry.load(GROUP, name)
    if not isinstance(found, Agent):
        raise ConfigError(f"{name!r} names a {type(found).__name__}, not an Agent")
    return found


def from_toml(path: Path) -> Agent:
    """Fields as `Agent` has them. Functions cannot be said in TOML; everything else can."""
    try:
        return _anchor(msgspec.convert(tomllib.loads(path.read_text("utf-8")), Agent), path.parent)
    except OSError as error:
        raise ConfigError(f"cannot read the agent file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"agent file {str(path)!r}: {error}") from error


def _anchor(agent: Agent, folder: Path) -> Agent:
    """A layer's folder or archive is meant from where the agent's file lies."""
    sources = {"folder": agent.layer.folder, "archive": agent.layer.archive}
    found = {name: str((folder / source).resolve()) for name, source in sources.items() if source is not None}
    return replace(agent, layer=replace(agent.layer, **found)) if found else agent


def default_prompt() -> str:
    """The system prompt that ships with the package, for callers that want one and have none of their own."""
    return files("rollyard.agents").joinpath("system_prompt.md").read_text("utf-8")
