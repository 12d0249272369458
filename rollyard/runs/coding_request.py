"""What a client of the coding environment may ask for, and what its server has fixed.

Who answers the agent's model calls, in which sandbox and from which image is the server's choice, unless it says that clients
choose. Nothing here names a path on the server: files come with their contents.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError, EnvError
from rollyard.core.limits import Limits
from rollyard.core.rollout import Rollout
from rollyard.core.task import McpServer

_SERVERS_OWN = ("mode", "model", "base_url", "key", "sandbox", "template")


class CodingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a server fixes for every rollout. `policy` is a name such as `upstream:URL`, or the policy itself; `renderer` is
    for an environment whose steps are model calls: its observations then carry the prompt in token ids."""

    agent: str = "opencode"
    policy: Any = None
    base_url: str | None = None
    model: str | None = None
    key: str | None = None
    mode: str | None = None
    sandbox: Any = "local"
    max_calls: int | None = None
    limits: Limits | None = None
    renderer: Any = None
    clients_choose: bool = False

    def settings(self) -> dict[str, Any]:
        kept = {n: getattr(self, n) for n in self.__struct_fields__ if n not in ("renderer", "clients_choose")}
        return {name: value for name, value in kept.items() if value is not None}


class RolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of `run_rollout` that travel: `files` are contents by path, `verify` are commands whose share of
    successes is the reward, `collect` are globs of files to bring back."""

    instruction: str
    agent: str | None = None
    mode: str | None = None
    model: str | None = None
    base_url: str | None = None
    key: str | None = None
    sandbox: str | None = None
    template: str | None = None
    files: dict[str, str] | None = None
    setup: list[str] | None = None
    verify: list[str] | None = None
    system_prompt: str | None = None
    disabled_tools: list[str] | None = None
    mcp: list[McpServer] | None = None
    disable_thinking: bool | None = None
    max_tokens_cap: int | None = None
    top_logprobs: int | None = None
    max_calls: int | None = None
    limits: dict[str, float] | None = None
    task_id: str | None = None
    episode_id: str | None = None
    seed: int | None = None
    labels: dict[str, str] | None = None
    collect: list[str] | None = None

    def arguments(self, options: CodingOptions) -> dict[str, Any]:
        """Those of `run_rollout`, the server's own filled in. What only the server may choose is refused by name."""
        given = {n: getattr(self, n) for n in self.__struct_fields__ if getattr(self, n) is not None}
        if not options.clients_choose and (taken := [n for n in _SERVERS_OWN if n in given]):
            raise ConfigError(f"{', '.join(taken)}: this server decides that", hint="serve it with --clients-choose")
        settings = options.settings()
        if "base_url" in given:
            settings.pop("policy", None)  # the client says who answers
        if self.limits is not None:
            given["limits"] = _limits(self.limits, options.limits)
        return settings | given


def request_of(fields: Mapping[str, Any]) -> RolloutRequest:
    try:
        return msgspec.convert(fields, RolloutRequest)
    except msgspec.ValidationError as error:
        raise EnvError(f"options: {error}") from error


def _limits(asked: Mapping[str, float], served: Limits | None) -> Limits:
    unknown = sorted(set(asked) - set(Limits.__struct_fields__))
    if unknown:
        raise ConfigError(f"limits has no {', '.join(unknown)}")
    return Limits(**({} if served is None else msgspec.structs.asdict(served)) | dict(asked))


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
