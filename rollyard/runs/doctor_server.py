"""What a model server gives to each policy that could use it, in the rows of the doctor."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urlsplit

from rollyard.core.errors import ConfigError, Error
from rollyard.policy.server_probe import ServerProbe
from rollyard.policy.tokens_policy import tokens
from rollyard.policy.upstream_policy import upstream
from rollyard.runs.doctor import DoctorFinding


class ProbedPolicy(Protocol):
    async def probe(self) -> ServerProbe: ...
    async def aclose(self) -> None: ...


async def examine_server(url: str, model: str | None = None, key_env: str | None = None) -> list[DoctorFinding]:
    """By `upstream` and by `tokens`. A server that only one of them can use is healthy."""
    base = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"
    found = await _probe("upstream", upstream(base, model, key_env=key_env))
    if any(row.state == "bad" for row in found):
        return found
    return [*found, *await _probe("tokens", tokens(base, model, key_env=key_env))]


async def _probe(group: str, policy: ProbedPolicy) -> list[DoctorFinding]:
    try:
        probe = await policy.probe()
    except Error as error:
        state = "bad" if group == "upstream" else "absent"
        advice = error.hint or "is the server running, and is the address right?"
        if group == "tokens" and not isinstance(error, ConfigError):
            advice = error.hint or "use upstream: this server does not take and give token ids"
        return [DoctorFinding(group=group, name="server", state=state, found=error.message, advice=advice)]
    finally:
        await policy.aclose()
    server = DoctorFinding(group=group, name="server", state="ok", found=probe.url)
    rows = [
        DoctorFinding(
            group=group, name=row.name, state="weak" if row.advice else "ok", found=row.found, advice=row.advice
        )
        for row in probe.rows
    ]
    return [server, *rows]
