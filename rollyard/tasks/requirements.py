"""What a task asks for that a backend or an agent cannot give: refused by name before anything opens, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from rollyard.core.errors import Unsupported
from rollyard.core.sandbox import Capabilities
from rollyard.core.task import Site, Task, VerifierSpec


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
    services = {hook.service for spec in specs for hook in spec.collect}
    services |= {
        artifact.service or "main" for artifact in (*task.artifacts, *(a for s in task.steps for a in s.artifacts))
    }
    if others := sorted(services - {"main"}):
        raise Unsupported(
            f"task {task.id!r} collects from the service {others[0]!r}; there is only the agent's sandbox"
        )


def _verifiers(task: Task) -> list[VerifierSpec]:
    found = [task.verifier, *(step.verifier for step in task.steps)]
    return [spec for spec in found if spec is not None]


def _site(site: Site, can: Capabilities) -> Iterator[str]:
    if site.os == "windows":
        yield "asks for Windows"
    if site.compose is not None:
        yield f"needs several services ({site.compose})"
    if site.resources.accelerated:
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
