"""The network a task gets in each of its phases, out of what it asks for and what the caller allows (`--network`,
`--build-network`, `--pull`)."""

from __future__ import annotations

import msgspec

from rollyard.core.egress import NetworkOption, TaskNetwork, narrow
from rollyard.core.errors import ConfigError
from rollyard.core.sandbox import Capabilities
from rollyard.core.task import Task, VerifierSpec

PUBLIC = "*"


def asks_public(task: Task) -> bool:
    """Whether a part of the task wants the public network."""
    verifiers = [spec for spec in (task.verifier, *(step.verifier for step in task.steps)) if spec is not None]
    parts = [task, *task.steps, *verifiers, *(spec.site for spec in verifiers if spec.site is not None)]
    return "host" in (task.setup_network, *(part.network for part in parts))


def is_public(task: Task) -> bool:
    """Whether its agent was given the public network."""
    return task.network == "host" or PUBLIC in task.allowed_hosts


def give_network(
    task: Task, option: NetworkOption, can: Capabilities, *, building: NetworkOption, pull: tuple[str, ...] = ()
) -> Task:
    """The task with the networks that it gets, its builds by an option of their own, its images from the registries of `pull`.
    The public network is any name, through the proxy, where there is one."""

    callers = {"build_hosts": give_hosts((None, ()), building, can)[1], "pull": pull}

    def give(network: str | None, hosts: tuple[str, ...]) -> dict[str, object]:
        _check_author(task, hosts)
        found = give_hosts((network, hosts), option, can)
        return {"network": found[0], "allowed_hosts": found[1]}

    def judge(spec: VerifierSpec | None) -> VerifierSpec | None:
        if spec is None:
            return None
        own = give(spec.network, spec.allowed_hosts) if spec.network is not None else {}
        site = spec.site
        if site is not None:
            site = msgspec.structs.replace(site, **give(site.network, site.allowed_hosts), **callers)
        return msgspec.structs.replace(spec, **own, site=site)

    steps = tuple(
        msgspec.structs.replace(
            step,
            **(give(step.network, step.allowed_hosts) if step.network is not None else {}),
            verifier=judge(step.verifier),
        )
        for step in task.steps
    )
    if task.setup_network is not None:
        setup = give(task.setup_network, task.setup_hosts)
        task = msgspec.structs.replace(task, setup_network=setup["network"], setup_hosts=setup["allowed_hosts"])
    own = give(task.network, task.allowed_hosts)
    return msgspec.structs.replace(task, **own, **callers, verifier=judge(task.verifier), steps=steps)


def give_hosts(wanted: TaskNetwork, option: NetworkOption, can: Capabilities) -> TaskNetwork:
    network, hosts = narrow(wanted, option)
    return ("allowlist", (PUBLIC,)) if network == "host" and can.network_allowlist else (network, hosts)


def _check_author(task: Task, hosts: tuple[str, ...]) -> None:
    if not task.trusted and (odd := next((host for host in hosts if "@" in host), None)):
        raise ConfigError(
            f"task {task.id!r} is from elsewhere and says where the name in {odd!r} leads",
            hint="name the host in --network allow:..., or trust the task",
        )
