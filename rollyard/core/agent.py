"""An `Agent` is data: what to install, what to write, how to start it, how to read what it prints.

Values are templates. `{instruction}`, `{model}`, `{root_url}`, `{base_url}`, `{key}`, `{home}`, `{workdir}`, `{prefix}`,
`{context_window}` and the options' own names are replaced in one pass, as data: never by a shell, and never twice. A file
is text, or a tree of mappings and lists that is serialised *after* its strings were replaced, so that no value can break
out of its JSON, TOML or YAML. At most three functions fill in where data cannot: `command`, `config`, `events`.

A `Launch` is what one start is given: the rollout's instruction, places, endpoint and options. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec

from rollyard.core.call import Dialect
from rollyard.core.errors import ConfigError
from rollyard.core.events import AgentEvent, AgentEventKind
from rollyard.core.sandbox import Isolation
from rollyard.core.sequences import check_sequences
from rollyard.core.task import McpServer

Switch = Literal["system_prompt", "disabled_tools", "disable_thinking", "max_tokens"]
McpStyle = Literal["claude", "gemini", "codex", "opencode", "goose", "cline", "openhands"]
Tree = Mapping[str, Any]


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A read-only addition built on the host. Versions are pinned; `node`/`python` are the interpreters it carries. npm takes
    no version that is younger than `before` (a date), so that what the packages depend on is the same next year. With
    `sandboxed` no code of a package runs on this machine: archives are downloaded here, only wheels of pip, and unpacked in a
    sandbox, where install scripts of npm run.

    `folder` or `archive` (a tar, compressed or not) is a directory of this machine that is the layer, programs in its `bin`.
    With `commands` it is what they work on: they run once, in a sandbox of the backend from the image `build_image`, in `/src`,
    and what they leave under `$PREFIX` is the layer."""

    npm: tuple[str, ...] = ()
    before: str | None = None
    pip: tuple[str, ...] = ()
    node: str | None = None
    python: str | None = None
    sandboxed: bool = False
    folder: str | None = None
    archive: str | None = None
    commands: tuple[str, ...] = ()
    build_image: str = "host"

    def __post_init__(self) -> None:
        check_sequences(self, commands=("commands",))
        if self.folder is not None and self.archive is not None:
            raise ConfigError("a layer comes from a folder or from an archive, not from both")


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
    solution: str | None = None  # the path in the sandbox of the task's solution script, for the oracle
    allow_unsafe: bool = False
    # Goes on from its session: with the next turn, or at a call it was cut at
    resumes: Literal["turn", "call"] | None = None

    def __post_init__(self) -> None:
        check_sequences(self)

    @property
    def base_url(self) -> str:
        return f"{self.root_url}/v1"


class Addition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an option or a dialect adds: arguments at the agent's `{options}` place, variables, and files. Trees for a file
    that exists are merged into it."""

    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    files: Mapping[str, str | Tree] = {}

    def __post_init__(self) -> None:
        check_sequences(self)


class ToolUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tool of the agent's by name, with arguments; `{instruction}` in them stands for what is asked."""

    tool: str
    args: Mapping[str, Any] = {}


class Resume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How an agent goes on from its own session, where its files are as it left them. `argv` takes the place of the agent's own;
    `{instruction}` in it is what is said to it next. `interrupted` is added where it was cut off in the middle of a turn.

    `settle_s` is for an agent that asks first and writes its session later: a snapshot waits until it has been idle for so many
    seconds."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    interrupted: Addition = Addition()
    settle_s: float = 0.0

    def __post_init__(self) -> None:
        check_sequences(self)


class Mcp(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where and how an agent reads its MCP servers: the file, the key in it, and whose format the entries have.

    `secret` is how that file refers to the variable that holds the gate's key (`"${ROLLYARD_KEY}"`), so that the key itself
    stays out of the file. `adds` is what having any server adds."""

    style: McpStyle
    file: str
    key: str = "mcpServers"
    secret: str | None = None
    transports: tuple[Literal["stdio", "http", "sse"], ...] = ("stdio", "http")
    adds: Addition = Addition()

    def __post_init__(self) -> None:
        check_sequences(self)


class EventRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A line of output that is an event: `when` gives what it holds at a path (`message.content.0.text`); the others are paths
    to what the event says. `ok` points to true where a `done` went well, `failed` to something where it did not."""

    when: Mapping[str, str | int | float | bool | None]
    kind: AgentEventKind
    text: str | None = None
    tool: str | None = None
    call_id: str | None = None
    fields: str | None = None
    ok: str | None = None
    failed: str | None = None


DEFAULT_AGENT = "pi"  # where none is named


class Agent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`wires` is what each dialect it can speak adds, the default one first; an agent without any calls no model. `options` is
    what each option it honours adds. An option that is not a key there is refused by name before anything opens."""

    name: str
    version: str | None = None
    summary: str = ""
    layer: LayerSpec = LayerSpec()
    check: tuple[str, ...] = ()  # an argv that succeeds when the agent is installed
    argv: tuple[str, ...] = ()
    stdin: str | None = None  # what it reads there, from a file; otherwise its standard input is closed
    env: Mapping[str, str] = {}
    files: Mapping[str, str | Tree] = {}
    wires: Mapping[Dialect, Addition] = {}
    options: Mapping[Switch, Addition] = {}
    tools: tuple[str, ...] = ()  # its tools by the names that `disabled_tools` takes; any name where none is listed
    mcp: Mcp | None = None
    artifacts: tuple[str, ...] = ()  # globs under {home} or {workdir}
    root: Literal["ok", "refuses", "needs"] = "ok"
    needs_isolation: Isolation | None = None  # its commands run without a question: this isolation or stronger
    subagent: ToolUse | None = None  # how its model starts a sub-agent
    resume: Resume | None = None  # how it goes on from its own session; None: it cannot
    freeze_s: float = 0.0  # asleep it has to be frozen, or its memory comes back by itself; for at most so long
    says_done: bool = False  # its output says how it ended; an exit without that event is a failure
    acts_by: Literal["tools", "keystrokes", "edits"] = "tools"  # the last two are read out of the model's text
    asks_for: tuple[
        str, ...
    ] = ()  # globs of hosts it connects to in any configuration; failing to reach them does no harm
    off: tuple[str, ...] = ()  # features that are switched off in it; for the table of agents
    command: Callable[[Launch, list[str]], list[str]] | None = None  # has the last word on argv
    config: Callable[[Launch], Mapping[str, str | bytes | Tree]] | None = None  # merged as an `Addition`'s files are
    events: Callable[[str, str], Iterable[AgentEvent]] | None = None  # of a line, given also the one before it

    lines: tuple[EventRule, ...] = ()  # the same as a table, for an agent in a file

    def __post_init__(self) -> None:
        check_sequences(self)
        if self.lines and self.events is not None:
            raise ConfigError(f"agent {self.name!r}: events and lines both say how its output is read")

    @property
    def dialect(self) -> Dialect | None:
        """The dialect it speaks by default; None when it calls no model."""
        return next(iter(self.wires), None)

    @property
    def calls_model(self) -> bool:
        """Whether it calls a model: an agent that declares no `wires` does not."""
        return bool(self.wires)

    @property
    def switches(self) -> tuple[str, ...]:
        """The options it honours, by name; asking for any other is refused before anything opens."""
        return (*self.options, *(("mcp",) if self.mcp is not None else ()))
