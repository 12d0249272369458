"""An `Agent` is data: what to install, what to write, how to start it, how to read what it prints.

At most three functions fill in where data cannot: `command`, `config`, `events`. A `Launch` is what they are given: the one
rollout's instruction, places, endpoint and options. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from rollyard.core.call import Dialect
from rollyard.core.events import AgentEvent
from rollyard.core.sandbox import Isolation
from rollyard.core.task import McpServer

Switch = Literal["system_prompt", "disabled_tools", "mcp", "disable_thinking", "max_tokens"]


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A read-only addition built on the host. Versions are pinned; `node`/`python` are the interpreters it carries."""

    npm: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    node: str | None = None
    python: str | None = None


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What one start of an agent is given. `root_url` is the gate without `/v1`; `base_url` is with it."""

    instruction: str
    model: str
    root_url: str
    key: str
    home: str
    workdir: str
    prefix: str  # where the agent's layer lies in the sandbox
    isolation: Isolation
    as_root: bool
    system_prompt: str | None = None
    disabled_tools: tuple[str, ...] = ()
    mcp: tuple[McpServer, ...] = ()
    disable_thinking: bool = False
    max_tokens: int | None = None
    context_window: int = 128_000
    dialect: Dialect | None = None
    solution: str | None = None
    allow_unsafe: bool = False

    @property
    def base_url(self) -> str:
        return f"{self.root_url}/v1"


class Agent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`argv`, `env` and `files` values are templates: `{instruction}`, `{model}`, `{root_url}`, `{base_url}`, `{key}`,
    `{home}`, `{workdir}`, `{prefix}` are replaced as whole values, never by a shell."""

    name: str
    version: str | None = None
    summary: str = ""
    dialect: Dialect | None = None
    dialects: tuple[Dialect, ...] = ()
    layer: LayerSpec = LayerSpec()
    check: tuple[str, ...] = ()  # an argv that succeeds when the agent is installed
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    mcp: Literal["none", "stdio", "http", "both"] = "none"
    artifacts: tuple[str, ...] = ()  # globs under {home} or {workdir}
    root: Literal["ok", "refuses", "needs"] = "ok"
    needs_isolation: Isolation | None = (
        None  # its permission-skipping flags are used only at this isolation or stronger
    )
    switches: tuple[Switch, ...] = ()
    subagents: bool = False
    lingers: bool = False  # its process outlives its last event
    command: Callable[[Launch], list[str]] | None = None
    config: Callable[[Launch], Mapping[str, bytes]] | None = None
    events: Callable[[str], Iterable[AgentEvent]] | None = None
