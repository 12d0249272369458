"""What a task asks for that a backend or an agent cannot give: refused by name before anything opens, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from rollyard.core.errors import Unsupported
from rollyard.core.sandbox import Capabilities
from rollyard.core.task import Site, Task, VerifierSpec
from rollyard.tasks.harbor.compose import read_services


def refuse(task: Task, backend: str, can: Capabilities) -> None:
    """Raise for the first thing this backend cannot give `task`."""
    specs = _verifiers(task)
    sites = [task, *(spec.site for spec in specs if spec.site is not None)]
    networks = (
        [task.setup_network, *(site.network for site in sites)]
        + [spec.network for spec in specs]
        + [s.network for s in task.steps]
    )
    if "allowlist" in networks and not can.network_allowlist:
        raise Unsupported(
            f"backend {backend!r} cannot allow single hosts, which task {task.id!r} asks for",
            hint="or say --network none",
        )
    for problem in (problem for site in sites for problem in _site(site, can)):
        raise Unsupported(f"task {task.id!r} {problem}, which backend {backend!r} cannot give")
    for step in task.steps:
        own = (step.network, step.allowed_hosts)
        if step.network is not None and own != (task.network or "none", task.allowed_hosts):
            raise Unsupported(
                f"step {step.name!r} of task {task.id!r} has a network of its own; all steps share one sandbox"
            )
    if task.compose is not None:
        _refuse_services(task, specs)
    services = {hook.service for spec in specs for hook in spec.collect}
    services |= {
        artifact.service or "main" for artifact in (*task.artifacts, *(a for s in task.steps for a in s.artifacts))
    }
    if others := sorted(services - {"main"}):
        raise Unsupported(
            f"task {task.id!r} collects from the service {others[0]!r}; files are taken from the agent's sandbox alone",
            hint="let the service write them to a volume that main shows too",
        )


def _refuse_services(task: Task, specs: list[VerifierSpec]) -> None:
    """What services that share the agent's network cannot have; and what of their file is not supported."""
    found = read_services(task.compose or "")
    stopped = [one.name for one in found.others if one.verify == "stop"]
    if stopped and task.steps:
        raise Unsupported(
            f"task {task.id!r} has steps, and its service {stopped[0]!r} would be gone after the first one's tests",
            hint="say x-rollyard.verify: keep",
        )
    own = (task.network or "none", task.allowed_hosts)
    for spec in specs:
        networks = [(spec.network, spec.allowed_hosts)]
        networks += [(spec.site.network, spec.site.allowed_hosts)] if spec.site is not None else []
        if found.kept and any(network is not None and (network, hosts) != own for network, hosts in networks):
            raise Unsupported(
                f"the verifier of task {task.id!r} has a network of its own; services share the agent's",
                hint="or end them before the tests: x-rollyard.verify: stop",
            )


def _verifiers(task: Task) -> list[VerifierSpec]:
    found = [task.verifier, *(step.verifier for step in task.steps)]
    return [spec for spec in found if spec is not None]


def _site(site: Site, can: Capabilities) -> Iterator[str]:
    if site.os == "windows":
        yield "asks for Windows"
    if site.compose is not None and not (can.services and isinstance(site, Task)):
        yield f"needs several services ({site.compose})"
    if site.resources.accelerated and not (can.gpus and site.resources.tpu is None):
        yield "asks for accelerators"
    if (site.build is not None or site.image != "host") and not can.images:
        yield f"needs the image {site.image if site.build is None else site.build!r}"
    if site.build is not None and site.image == "host" and not (can.snapshot or can.builds):
        yield f"needs {site.build}/Dockerfile to be built"
    if site.layers and not can.layers:
        yield "names layers"


def refuse_history(task: Task, agent: str) -> None:
    """Prior context can only be given to an agent that takes it, and none here does."""
    if task.history is not None or any(step.history is not None for step in task.steps):
        raise Unsupported(
            f"task {task.id!r} ships a prior conversation (trajectory.json), which agent {agent!r} cannot be given"
        )
