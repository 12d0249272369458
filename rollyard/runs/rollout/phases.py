"""Which hosts a rollout's sandbox may reach, phase by phase: its setup, the agent, and a verifier that works in the same place.

A build and a verifier in a sandbox of its own have theirs when they open one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from rollyard.core.egress import EgressRefusal
from rollyard.core.protocols import Backend, Sandbox
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import Task
from rollyard.net.egress.proxy import Tell
from rollyard.runs.rollout.plan import RolloutPlan
from rollyard.runs.rollout.stages import Stages

Phase = Literal["setup", "agent", "verify"]
PhaseHosts = Mapping[Phase, tuple[str, ...]]
_PORTS = {"http": 80, "https": 443}


def list_hosts(plan: RolloutPlan, task: Task, place: SandboxSpec) -> PhaseHosts:
    """`place` is what the task gives its agent. The model's or the gate's own address, where the agent is given one, is for
    the agent alone, and may be anywhere: the caller named it."""
    setup = task.setup_hosts if task.setup_network is not None else place.allowed_hosts
    urls = [url for url in (plan.direct[0] if plan.direct else None, plan.options.gate_url) if url is not None]
    return {
        "setup": setup,
        "agent": (*place.allowed_hosts, *map(_name_host, urls)),
        "verify": place.allowed_hosts,
    }


def open_for(place: SandboxSpec, hosts: PhaseHosts, plan: RolloutPlan, backend: Backend) -> SandboxSpec:
    """What the sandbox is opened with: the hosts of every phase, since listeners are made once."""
    every = tuple(dict.fromkeys(host for phase in hosts.values() for host in phase))
    if place.network == "host" or not every:
        return place
    if backend.capabilities.network_allowlist:
        return msgspec.structs.replace(place, network="allowlist", allowed_hosts=every)
    return msgspec.structs.replace(place, network="host") if plan.direct is not None else place


def enter_phase(sandbox: Sandbox, hosts: PhaseHosts, phase: Phase) -> None:
    if sandbox.egress is not None:
        sandbox.egress.allow(hosts[phase])


def refusals_to(stages: Stages) -> Tell:
    """Each refused connection as an event of the rollout."""

    async def tell(refusal: EgressRefusal) -> None:
        await stages.tell("network.refused", stage=stages.current, **msgspec.to_builtins(refusal))

    return tell


def _name_host(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS.get(parts.scheme, 443)}@*"
