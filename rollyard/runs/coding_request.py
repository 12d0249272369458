"""What a client of the coding environment may ask for, and what its server has fixed.

Who answers the agent's model calls, in which sandbox and from which image is the server's choice, unless it says that clients
choose. Nothing here names a path on the server: files come with their contents.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, cast

import msgspec

from rollyard import agents
from rollyard.core.errors import ConfigError, EnvError, UnknownName
from rollyard.core.limits import Limits
from rollyard.core.protocols import Backend, Policy
from rollyard.core.rollout import Rollout
from rollyard.core.sandbox import is_path
from rollyard.policy.renderers.protocol import Renderer
from rollyard.runs.rollout.options import OPTIONS, RolloutOptions
from rollyard.runs.rollout.run_rollout import RolloutArguments

# beside the options whose setter is the server
_SERVERS_OWN = ("key", "sandbox", *(name for name, one in OPTIONS.items() if one.setter == "server"))


class CodingOptions(RolloutOptions, frozen=True, kw_only=True):
    """What a server fixes for every rollout. `policy` is a name such as `upstream:URL`, or the policy itself; `renderer` is
    for an environment whose steps are model calls: its observations then carry the prompt in token ids."""

    agent: str = "opencode"
    policy: Policy | str | None = None
    key: str | None = None
    sandbox: str | Backend = "local"
    renderer: Renderer | str | None = None
    clients_choose: bool = False

    @property
    def settings(self) -> CodingArguments:
        """As arguments of `run_rollout`."""
        options = RolloutOptions(**{name: getattr(self, name) for name in OPTIONS})
        return {
            "agent": self.agent,
            "policy": self.policy,
            "sandbox": self.sandbox,
            "key": self.key,
            "options": options,
        }


class CodingArguments(RolloutArguments, total=False):
    """The arguments of `run_rollout` beside the instruction."""

    agent: str
    policy: Policy | str | None
    sandbox: str | Backend
    options: RolloutOptions


class TaskRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client says about the task: `files` are contents by path, `verify` are commands whose share of successes is the
    reward."""

    instruction: str
    agent: str | None = None
    key: str | None = None
    sandbox: str | None = None
    files: dict[str, str] | None = None
    setup: list[str] | None = None
    verify: list[str] | None = None
    task_id: str | None = None
    episode_id: str | None = None

    def arguments(self, served: CodingOptions) -> CodingArguments:
        """Those of `run_rollout`, the server's own filled in. What only the server may choose is refused by name."""
        given: dict[str, Any] = {n: getattr(self, n) for n in self.__struct_fields__ if n != "instruction"}
        given = {name: value for name, value in given.items() if value is not None}
        if not served.clients_choose and (taken := [n for n in _SERVERS_OWN if n in given]):
            raise ConfigError(f"{', '.join(taken)}: this server decides that", hint="serve it with --clients-choose")
        if (agent := given.get("agent", served.agent)) != served.agent and agent not in (known := agents.names()):
            raise UnknownName("agent", agent, known)  # a file or a module is the server's to name
        if is_path(given.get("image", "")):
            raise ConfigError(f"image {given['image']!r}: an image has a name; a path of the server is none")
        settings = served.settings
        options = settings.pop("options")
        if "base_url" in given or "key" in given:
            options = msgspec.structs.replace(options, key_env=None)  # the server's key is for the server's choice
        if "base_url" in given:
            settings.pop("policy")  # the client says who answers
            settings.pop("key")
        if "limits" in given:
            given["limits"] = _limits(given["limits"], served.limits)
        return cast(CodingArguments, {**settings, **given, "options": options})


def _client_fields() -> Iterable[tuple[str, Any, None]]:
    """The options that may come from a client. One that is not given is the server's."""
    for option in OPTIONS.values():
        if option.setter != "operator":
            kind = dict[str, float] if option.name == "limits" else option.type
            yield option.name, Annotated[kind | None, msgspec.Meta(description=option.help)], None


# The arguments of `run_rollout` that travel: the task, and every option that a client may set.
RolloutRequest = cast(
    type[TaskRequest],
    msgspec.defstruct(
        "RolloutRequest",
        list(_client_fields()),
        bases=(TaskRequest,),
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
        module=__name__,
    ),
)


def request_of(fields: Mapping[str, Any]) -> TaskRequest:
    try:
        return msgspec.convert(fields, RolloutRequest)
    except msgspec.ValidationError as error:
        raise EnvError(f"options: {error}") from error


def _limits(wanted: Mapping[str, float], served: Limits | None) -> Limits:
    unknown = sorted(set(wanted) - set(Limits.__struct_fields__))
    if unknown:
        raise ConfigError(f"limits has no {', '.join(unknown)}")
    return Limits(**({} if served is None else msgspec.structs.asdict(served)) | dict(wanted))


def summary(done: Rollout) -> dict[str, Any]:
    """A rollout as plain values."""
    return {
        "rollout_id": done.id,
        "task_id": done.task_id,
        "episode_id": done.episode_id,
        "sandbox_id": done.sandbox_id,
        "agent": done.agent,
        "mode": done.mode,
        "status": done.status,
        "reward": done.reward,
        "install": msgspec.to_builtins(done.install),
        "setup": msgspec.to_builtins(done.setup),
        "verify": msgspec.to_builtins(done.verdict.commands) if done.verdict is not None else [],
        "exit_code": done.exit_code,
        "log_tail": done.log_tail,
        "gate_log_tail": done.gate_log_tail,
        "turns": msgspec.to_builtins(done.turns),
        "files": {path: _file_json(content) for path, content in done.files.items()},
        "wall_s": done.wall_s,
        "error": done.error,
    }


def _file_json(content: bytes) -> dict[str, str]:
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
