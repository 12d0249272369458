"""The options of a rollout, whatever its agent: each is declared here once, with its help text.

All that takes options is made from these fields: the keywords of `run_rollout`, a run's TOML file (`RunConfig` is these and
the run's own), the command line, the requests of the coding environment and the page's form. A new option is a field here, its
line in `RolloutFields` for type checkers, and the code that acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, cast, get_args, get_origin, get_type_hints

import msgspec

from rollyard.core.call import Dialect
from rollyard.core.egress import parse_build_network, parse_network_option
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.limits import Limits
from rollyard.core.numbers import check_least
from rollyard.core.sandbox import Isolation, Mount
from rollyard.core.sequences import as_tuple, check_sequences
from rollyard.core.task import McpServer
from rollyard.images.registries import parse_registry

# Who may set an option of a rollout that a server runs: any client, clients of a server that lets them choose, or only the
# operator, because it reaches the machine itself.
Setter = Literal["client", "server", "operator"]
WhenStale = Literal["cancel", "mask"]
Kind = Literal["flag", "number", "text", "lines"]  # how an option is written as text; lines may be several


def _help(text: str, setter: Setter = "client") -> msgspec.Meta:
    return msgspec.Meta(description=text, extra={"setter": setter})


class RolloutOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a rollout is made. Unset means the documented default; what a mode, agent or backend cannot honour is refused by
    name before anything opens."""

    mode: Annotated[str | None, _help("black_box, transparent_proxy or interception_gate", "server")] = None
    model: Annotated[str | None, _help("model id to request from the server", "server")] = None
    base_url: Annotated[str | None, _help("URL of a model server; short for the policy upstream:URL", "server")] = None
    key_env: Annotated[str | None, _help("environment variable that holds the model server's key", "operator")] = None
    direct: Annotated[bool, _help("black_box only: give the agent base_url and the key itself", "operator")] = False
    system_prompt: Annotated[str | None, _help("the agent's system prompt, instead of its own")] = None
    disabled_tools: Annotated[tuple[str, ...], _help("a tool of the agent's that it may not use")] = ()
    mcp: Annotated[tuple[McpServer, ...], _help("an MCP server that the agent may use, as JSON")] = ()
    dialect: Annotated[Dialect | None, _help("the wire format the agent speaks, where it knows several")] = None
    disable_thinking: Annotated[bool | None, _help("ask the model to answer without thinking first")] = None
    max_tokens_cap: Annotated[int | None, _help("completion tokens that one call may ask for")] = None
    top_logprobs: Annotated[int | None, _help("alternatives recorded beside each sampled token")] = None
    max_calls: Annotated[int | None, _help("most model calls of one rollout")] = None
    user: Annotated[
        str | None,
        _help(
            "a policy in the user's place (scripted:FILE, upstream:URL ...): it answers the agent's last message until it is "
            "content",
            "operator",
        ),
    ] = None
    user_turns: Annotated[int | None, _help("most times that the user answers; 10 by default")] = None
    max_staleness: Annotated[
        int | None, _help("most policy versions that an answer may be behind the newest one before its rollout ends")
    ] = None
    when_stale: Annotated[
        WhenStale, _help("where answers are too old (max_staleness): cancel the rollout, or mask them in training rows")
    ] = "cancel"
    snapshot_every: Annotated[
        int | None,
        _help(
            "keep the sandbox's files at every n-th call of the agent, so that a branch there goes on from them",
            "server",
        ),
    ] = None
    sleep_after: Annotated[
        float | None,
        _help(
            "seconds that a model call is held before the agent's memory goes to the machine's swap; local backend",
            "operator",
        ),
    ] = None
    limits: Annotated[Limits | None, _help("seconds a stage may take, as STAGE=SECONDS")] = None
    seed: Annotated[int | None, _help("seed of the first attempt; the next one has the next number")] = None
    labels: Annotated[Mapping[str, str], _help("a label of the rollout, as NAME=VALUE")] = {}
    image: Annotated[
        str | None, _help("the image to open tasks from, instead of their own; on e2b a template's name", "server")
    ] = None
    prebaked: Annotated[
        bool | None,
        _help(
            "look for the agent on the image's PATH first; one of the right version is used, and none installed (unset: where "
            "the backend mounts no layers)"
        ),
    ] = None
    agent_setup: Annotated[
        tuple[str, ...], _help("a shell command that the agent needs run in its sandbox before the task's setup")
    ] = ()
    collect: Annotated[
        tuple[str, ...],
        _help("a glob of files to bring back from the sandbox; below /logs/verifier from the verifier's"),
    ] = ()
    gate_url: Annotated[
        str | None, _help("your own route to the gate, instead of a listener in the sandbox", "operator")
    ] = None
    network: Annotated[
        str,
        _help(
            "what tasks may reach: task (as they say, the public network left out), none, allow:HOST,... (builds too), public",
            "operator",
        ),
    ] = "task"
    build_network: Annotated[
        str | None,
        _help(
            "what Dockerfiles may reach while they are built: none, allow:HOST,... or public (unset: as network says)",
            "operator",
        ),
    ] = None
    pull: Annotated[
        tuple[str, ...],
        _help(
            "a registry that images which are not here may be pulled from, beside those of the registries file: "
            "[http://]HOST[:PORT][@ADDRESS], such as docker.io; local backend",
            "operator",
        ),
    ] = ()
    trust_tasks: Annotated[
        bool,
        _help("trust the authors of tasks from elsewhere with this machine; remembered for these files", "operator"),
    ] = False
    env: Annotated[
        tuple[str, ...], _help("a variable of this machine that tasks from elsewhere may read", "operator")
    ] = ()
    allow_unsafe: Annotated[bool, _help("accept a sandbox that isolates nothing", "operator")] = False
    mounts: Annotated[
        tuple[Mount, ...], _help("a directory of this machine to show in the sandbox, as JSON", "operator")
    ] = ()
    min_isolation: Annotated[Isolation, _help("the weakest isolation level accepted", "operator")] = "landlock"
    sandbox_options: Annotated[
        Mapping[str, str], _help("an option of the sandbox backend, as NAME=VALUE", "operator")
    ] = {}

    def __post_init__(self) -> None:
        check_sequences(self)
        if self.image == "":
            raise ConfigError("image names nothing", hint="leave it out for the task's own, or say host")
        parse_network_option(self.network)
        if self.build_network is not None:
            parse_build_network(self.build_network)
        for registry in self.pull:
            parse_registry(registry)
        check_least(1, max_tokens_cap=self.max_tokens_cap, max_calls=self.max_calls, snapshot_every=self.snapshot_every)
        check_least(1, user_turns=self.user_turns)
        if self.user_turns is not None and self.user is None:
            raise ConfigError("user_turns without a user", hint="give user too")
        check_least(0, top_logprobs=self.top_logprobs, seed=self.seed, max_staleness=self.max_staleness)
        check_least(0, sleep_after=self.sleep_after)
        if self.max_staleness is None and self.when_stale != "cancel":
            raise ConfigError(f"when_stale={self.when_stale!r} without max_staleness", hint="give max_staleness too")


class RolloutFields(TypedDict, total=False):
    """`RolloutOptions` as keywords. None stands for the default."""

    mode: str | None
    model: str | None
    base_url: str | None
    key_env: str | None
    direct: bool
    system_prompt: str | None
    disabled_tools: Sequence[str]
    mcp: Sequence[McpServer]
    dialect: Dialect | None
    disable_thinking: bool | None
    max_tokens_cap: int | None
    top_logprobs: int | None
    max_calls: int | None
    user: str | None
    user_turns: int | None
    max_staleness: int | None
    when_stale: WhenStale
    snapshot_every: int | None
    sleep_after: float | None
    limits: Limits | None
    seed: int | None
    labels: Mapping[str, str] | None
    image: str | None
    prebaked: bool | None
    agent_setup: Sequence[str]
    collect: Sequence[str]
    gate_url: str | None
    network: str
    build_network: str | None
    pull: Sequence[str]
    trust_tasks: bool
    env: Sequence[str]
    allow_unsafe: bool
    mounts: Sequence[Mount]
    min_isolation: Isolation
    sandbox_options: Mapping[str, str]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One of the fields, for what is made from them."""

    name: str
    type: Any
    default: Any
    help: str
    setter: Setter

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def kind(self) -> Kind:
        if bool in _members(self.type):
            return "flag"
        if any(_is_collection(member) for member in _members(self.type)):
            return "lines"
        return "number" if int in _members(self.type) else "text"


def _find_options() -> Iterable[Option]:
    hints = get_type_hints(RolloutOptions, include_extras=True)
    for field in msgspec.structs.fields(RolloutOptions):
        kind, meta = get_args(hints[field.name])
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        help_text, setter = meta.description, meta.extra["setter"]
        yield Option(name=field.name, type=kind, default=default, help=help_text, setter=setter)


def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return tuple(member for member in get_args(kind) if member is not type(None)) if _is_union(kind) else (kind,)


def _is_union(kind: Any) -> bool:
    return type(None) in get_args(kind)


def _is_collection(kind: Any) -> bool:
    origin = get_origin(kind)
    return origin is tuple or origin is Mapping or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))


OPTIONS: Mapping[str, Option] = {option.name: option for option in _find_options()}


def merge_options(fields: RolloutFields, base: RolloutOptions | None = None) -> RolloutOptions:
    """`base` with the fields that are given over it. A string where a list belongs is refused by its name."""
    given: dict[str, Any] = {}
    for name, value in fields.items():
        option = OPTIONS[name]
        if value is None:
            value = option.default
        elif isinstance(option.default, tuple):
            value = as_tuple(cast(Iterable[Any], value), name)
        given[name] = value
    return msgspec.structs.replace(base or RolloutOptions(), **given)


def read_options(texts: Mapping[str, Any]) -> RolloutFields:
    """Options as a command line or a form has them: text, or a list of texts where there may be several. None and an empty
    list are not given."""
    given = {name: _read(OPTIONS[name], value) for name, value in texts.items() if value is not None and value != []}
    return cast(RolloutFields, given)


_NUMBERS = {int: "no whole number", float: "no number"}


def _read(option: Option, value: Any) -> Any:
    try:
        if option.kind == "lines":
            return msgspec.convert(_read_lines(option, value), option.type, strict=False)
        return value if str in _members(option.type) else msgspec.convert(value, option.type, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        wanted = next((words for kind, words in _NUMBERS.items() if kind in _members(option.type)), None)
        if wanted is not None:
            raise ConfigError(f"{option.flag}: {value!r} is {wanted}", hint=option.help) from error
        if names := _names(option.type):
            raise UnknownName(option.flag, value, names, hint=option.help) from error
        raise ConfigError(f"{option.flag}: {error}", hint=option.help) from error


def _read_lines(option: Option, lines: Sequence[str]) -> Any:
    (kind,) = _members(option.type)
    if get_origin(kind) is tuple:
        return lines if get_args(kind)[0] is str else [msgspec.json.decode(line) for line in lines]
    pairs = [line.partition("=") for line in lines]
    if wrong := next((line for line, (_, equals, _) in zip(lines, pairs, strict=True) if not equals), None):
        raise ConfigError(f"{option.flag}: {wrong!r} has no =", hint=option.help)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        _check_seconds(option, kind, {name: value for name, _, value in pairs})
    return {name: value for name, _, value in pairs}


def _check_seconds(option: Option, kind: type[msgspec.Struct], given: Mapping[str, str]) -> None:
    for name, value in given.items():
        if name not in kind.__struct_fields__:
            raise UnknownName(f"stage of {option.flag}", name, kind.__struct_fields__, hint=option.help)
        try:
            float(value)
        except ValueError as error:
            raise ConfigError(f"{option.flag} {name}: {value!r} is no number", hint=option.help) from error


def _names(kind: Any) -> tuple[str, ...]:
    """The values of a type that lists them."""
    members = [member for member in (kind, *_members(kind)) if get_origin(member) is Literal]
    return get_args(members[0]) if members else ()


def write_options(fields: RolloutFields) -> list[str]:
    """The words of a command line that give these options."""
    words: list[str] = []
    for name, value in fields.items():
        option = OPTIONS[name]
        if option.kind == "flag":
            words.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        else:
            for text in _texts(value):
                words += [option.flag, text]
    return words


def _texts(value: Any) -> list[str]:
    if isinstance(value, tuple):
        items = cast(tuple[Any, ...], value)
        return [item if isinstance(item, str) else msgspec.json.encode(item).decode() for item in items]
    if isinstance(value, Limits):
        named: dict[str, Any] = msgspec.structs.asdict(value)
        return [f"{name}={seconds:g}" for name, seconds in named.items() if seconds is not None]
    if isinstance(value, Mapping):
        return [f"{name}={text}" for name, text in cast(Mapping[str, str], value).items()]
    return [str(value)]
