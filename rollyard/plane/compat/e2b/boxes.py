"""What is said of a sandbox to a client, and what a client may ask of one.

A sandbox's access token is its id and a signature of it, so nothing about it has to be kept: with a fixed secret it outlives a
restart, and any replica knows it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from rollyard.core.egress import is_address
from rollyard.core.plane import OnTimeout
from rollyard.core.protocols import Sandbox
from rollyard.core.sandbox import Resources
from rollyard.plane.compat.e2b.accounts import Accounts
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.e2b.metrics import UsageLog
from rollyard.plane.compat.e2b.processes import Processes
from rollyard.plane.compat.e2b.programs import KeptPrograms
from rollyard.plane.compat.e2b.templates import TemplateBuild

ENVD_VERSION = "0.6.7"
MOST_FORKS = 20
_ALL = ("0.0.0.0/0", "::/0")
_KNOWN = {"templateID", "timeout", "metadata", "envVars", "allow_internet_access", "network", "secure"} | {
    *("autoPause", "autoPauseMemory", "autoResume"),
}
_NETWORK = {"allowOut", "denyOut"}


class E2bSandbox:
    """A sandbox, the programs clients have started in it, and its users. `id` is the clients' name, `image` the engine's."""

    def __init__(
        self, id: str, template: str, image: str, sandbox: Sandbox, processes: Processes, accounts: Accounts
    ) -> None:
        self.id, self.template, self.image, self.sandbox = id, template, image, sandbox
        self.processes, self.accounts = processes, accounts
        self.usage = UsageLog(sandbox)
        self.has_metadata = False  # whether a file of it was seen to have some


def make_box(
    id: str, template: str, image: str, sandbox: Sandbox, build: TemplateBuild | None, kept: KeptPrograms | None = None
) -> E2bSandbox:
    """A sandbox with what the build that it is of says about programs in it."""
    accounts = Accounts(sandbox, user=build.user if build else None, workdir=build.workdir if build else None)
    return E2bSandbox(
        id, template, image, sandbox, Processes(sandbox, accounts, build.env if build else {}, kept), accounts
    )


class SandboxView(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox as `get` and `list` show it."""

    id: str
    template: str
    created_at: float
    expires_at: float | None
    metadata: Mapping[str, str]
    state: Literal["running", "paused"] = "running"
    on_timeout: OnTimeout = "end"
    auto_resume: bool = False
    hosts: tuple[str, ...] = ()
    resources: Resources = Resources()


class SandboxTokens:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of(self, sandbox_id: str) -> str:
        signature = hmac.new(self._secret, f"e2b {sandbox_id}".encode(), hashlib.sha256).hexdigest()
        return f"{sandbox_id}.{signature}"

    def id_in(self, token: str) -> str:
        """The sandbox that a token claims to be of, for clients that send nothing else. Not yet believed."""
        return token.rpartition(".")[0]


class E2bCreate(msgspec.Struct, frozen=True, kw_only=True):
    """A create request, read."""

    template: str
    seconds: float
    metadata: dict[str, str]
    env: dict[str, str]
    internet: bool | None
    hosts: tuple[str, ...]
    on_timeout: OnTimeout = "end"
    auto_resume: bool = False


def read_create(body: Mapping[str, Any]) -> E2bCreate:
    """Whatever is asked for and is not done here is refused by its name. A host of `allowOut` is open whatever is denied."""
    network: Mapping[str, Any] = body.get("network") or {}
    denied = network.get("denyOut") or []
    refused = [name for name in body if name not in _KNOWN and _asks(name, body[name])]
    refused += [f"network.{name}" for name in network if name not in _NETWORK and _asks(name, network[name])]
    if body.get("secure") is False:
        refused.append("secure=false (a sandbox's token is always needed)")
    refused += check_egress(network)
    if refused:
        raise E2bRefusal("unimplemented", f"{refused[0]} is not served here", 400)
    if not isinstance(body.get("templateID"), str) or not body["templateID"]:
        raise E2bRefusal("invalid_argument", "templateID is required")
    try:
        return msgspec.convert(
            {
                "template": body["templateID"],
                "seconds": body.get("timeout") or 300,
                "metadata": body.get("metadata") or {},
                "env": body.get("envVars") or {},
                "internet": False if denied else body.get("allow_internet_access"),
                "hosts": network.get("allowOut") or (),
                "on_timeout": _read_on_timeout(body),
                "auto_resume": bool((body.get("autoResume") or {}).get("enabled")),
            },
            E2bCreate,
        )
    except (msgspec.ValidationError, AttributeError) as error:
        raise E2bRefusal("invalid_argument", str(error)) from error


def check_egress(network: Mapping[str, Any]) -> list[str]:
    """What is asked of the way out that cannot be kept."""
    refused: list[str] = []
    denied = network.get("denyOut") or []
    if denied and not set(denied) & set(_ALL):
        refused.append("network.denyOut of single addresses, with the others open,")
    for host in network.get("allowOut") or ():
        if not is_address(str(host)) and set(str(host)) & set("@:"):
            refused.append(f"network.allowOut {host!r}")
        elif host in _ALL:
            refused.append("network.allowOut of all addresses")
    return refused


def _read_on_timeout(body: Mapping[str, Any]) -> OnTimeout:
    """Without its memory a sandbox is not paused but stopped: its files stay."""
    if not body.get("autoPause"):
        return "end"
    return "stop" if body.get("autoPauseMemory") is False else "pause"


def _asks(name: str, value: Any) -> bool:
    """Whether a field asks for something: clients also send what is so by default."""
    defaults: Mapping[str, Any] = {
        "allowPublicTraffic": True,
    }
    return bool(value != defaults[name] if name in defaults else value)


def show_made(box: E2bSandbox, tokens: SandboxTokens) -> dict[str, Any]:
    """The body of a create or connect reply."""
    return {
        "templateID": box.template,
        "sandboxID": box.id,
        "clientID": "rollyard",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": tokens.of(box.id),
    }


def describe(seen: SandboxView) -> dict[str, Any]:
    """Limits the operator did not set are shown as 0."""
    end = seen.expires_at if seen.expires_at is not None else seen.created_at + 30 * 86400
    return {
        "templateID": seen.template,
        "alias": seen.template,
        "sandboxID": seen.id,
        "clientID": "rollyard",
        "startedAt": show_time(seen.created_at),
        "endAt": show_time(end),
        "envdVersion": ENVD_VERSION,
        "cpuCount": max(1, round(seen.resources.cpus or 1)),
        "memoryMB": seen.resources.memory_mb or 0,
        "diskSizeMB": seen.resources.disk_mb or 0,
        "state": seen.state,
        "metadata": dict(seen.metadata),
        **({"network": {"allowOut": list(seen.hosts), "denyOut": [_ALL[0]]}} if seen.hosts else {}),
        "lifecycle": {
            "onTimeout": "kill" if seen.on_timeout == "end" else "pause",
            "autoResume": seen.auto_resume,
        },
    }


def show_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
