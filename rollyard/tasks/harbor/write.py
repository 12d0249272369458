"""A `Task` as a Harbor folder: the other direction of `harbor.py`. Loading what this writes gives the task back.

`task.toml` is made from the task's fields, not copied, in schema 1.4; files are copied. A step's or verifier's inherited
settings are written out where they apply.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core import toml
from rollyard.core.errors import ConfigError
from rollyard.core.limits import Limits
from rollyard.core.task import Artifact, Healthcheck, McpServer, Site, Step, Task, VerifierSpec
from rollyard.tasks.harbor.load import step_limits

_MODE = {"host": "public", "none": "no-network", "allowlist": "allowlist"}
_KEPT = ("README.md", ".gitignore")


def to_folder(task: Task, folder: str | Path) -> Path:
    """Write `task` into `folder`, which must be absent or empty."""
    root = Path(folder)
    if task.remote is not None:
        raise ConfigError(f"task {task.id!r} runs in a remote environment, which a folder of Harbor's cannot say")
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"{root} is not empty", hint="name a new folder")
    root.mkdir(parents=True, exist_ok=True)
    if task.compose is not None or task.build is not None:
        source = task.build if task.compose is None else str(Path(task.compose).parent)
        _copy_tree(source, root / "environment")
    _copy_tree(task.solution, root / "solution")
    for name in _KEPT:
        if task.source is not None and (Path(task.source) / name).is_file():
            shutil.copy(Path(task.source) / name, root / name)
    if task.steps:
        _write_shared_tests(task, root)
        for step in task.steps:
            _write_step(step, root / "steps" / step.name)
    else:
        (root / "instruction.md").write_text(task.instruction)
        if task.verifier is not None and task.verifier.tests:
            _copy_tree(task.verifier.tests[0], root / "tests")
    if task.history is not None:
        (root / "trajectory.json").write_text(task.history)
    (root / "task.toml").write_text(toml.dumps(_task_table(task, root)))
    return root


def _copy_tree(source: str | None, target: Path) -> None:
    if source is not None:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def _write_shared_tests(task: Task, root: Path) -> None:
    """The tests that several steps have in common, or that are not a step's own, are the task's."""
    for step in task.steps:
        if step.verifier is not None and step.verifier.tests and not _own_tests(step.verifier.tests[0], step):
            _copy_tree(step.verifier.tests[0], root / "tests")
            return


def _own_tests(directory: str, step: Step) -> bool:
    return Path(directory).parts[-3:] == ("steps", step.name, "tests")


def _write_step(step: Step, root: Path) -> None:
    root.mkdir(parents=True)
    (root / "instruction.md").write_text(step.instruction)
    if step.history is not None:
        (root / "trajectory.json").write_text(step.history)
    _copy_tree(step.workdir_files, root / "workdir")
    _copy_tree(step.solution, root / "solution")
    if step.verifier is not None and step.verifier.tests and _own_tests(step.verifier.tests[-1], step):
        _copy_tree(step.verifier.tests[-1], root / "tests")


def _compact(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value not in (None, (), [], {}, "")}


def _network(network: str | None, hosts: tuple[str, ...]) -> dict[str, Any]:
    return _compact({"network_mode": _MODE[network] if network else None, "allowed_hosts": list(hosts)})


def _task_table(task: Task, root: Path) -> dict[str, Any]:
    limits = task.limits
    package = {name: value for name, value in task.package.items() if name != "source"}
    timeout = limits.agent if limits is not None and not task.steps else None
    table: dict[str, Any] = {
        "schema_version": "1.4",
        "source": task.package.get("source"),
        "multi_step_reward_strategy": task.step_reward if task.steps else None,
        "artifacts": _artifacts(task.artifacts),
        "task": package,
        "metadata": {**task.metadata, **_compact({"rollyard": _extra(task, root)})},
        "agent": _compact({"timeout_sec": timeout, "user": task.user, **_agent_network(task)}),
        "verifier": _verifier(task.verifier) if task.verifier is not None else {},
        "environment": _environment(_for_setup(task), docker_image=task.image if _is_image(task) else None),
        "solution": _compact({"env": dict(task.solution_env)}),
        "steps": [_step(step) for step in task.steps],
    }
    return _compact(table)


def _agent_network(task: Task) -> dict[str, Any]:
    """Said by itself where setup has another."""
    return _network(task.network, task.allowed_hosts) if task.setup_network is not None else {}


def _for_setup(task: Task) -> Task:
    if task.setup_network is None:
        return task
    return msgspec.structs.replace(task, network=task.setup_network, allowed_hosts=task.setup_hosts)


def _is_image(site: Site) -> bool:
    return site.image != "host" or (site.build is None and site.compose is None)


def _environment(site: Site, *, docker_image: str | None) -> dict[str, Any]:
    resources = site.resources
    tpu = resources.tpu.partition(":") if resources.tpu is not None else None
    return _compact(
        {
            "build_timeout_sec": site.build_timeout_s if site.build_timeout_s != Site().build_timeout_s else None,
            "docker_image": docker_image,
            "os": site.os if site.os != "linux" else None,
            "cpus": resources.cpus,
            "memory_mb": resources.memory_mb,
            "storage_mb": resources.disk_mb,
            "gpus": resources.gpus,
            "gpu_types": list(resources.gpu_types),
            "skills_dir": site.skills,
            "workdir": site.workdir,
            **_network(site.network, site.allowed_hosts),
            "env": dict(site.env),
            "tpu": {"type": tpu[0], "topology": tpu[2]} if tpu is not None else None,
            "healthcheck": _healthcheck(site.healthcheck),
            "mcp_servers": [_mcp(server) for server in site.mcp],
        }
    )


def _healthcheck(check: Healthcheck | None) -> dict[str, Any] | None:
    if check is None:
        return None
    return {
        "command": check.command,
        "interval_sec": check.interval_s,
        "timeout_sec": check.timeout_s,
        "start_period_sec": check.start_period_s,
        "start_interval_sec": check.start_interval_s,
        "retries": check.retries,
    }


def _mcp(server: McpServer) -> dict[str, Any]:
    return _compact(
        {
            "name": server.name,
            "transport": "streamable-http" if server.transport == "http" else server.transport,
            "url": server.url,
            "command": server.command[0] if server.command else None,
            "args": list(server.command[1:]),
            "headers": dict(server.headers),
        }
    )


def _artifacts(artifacts: tuple[Artifact, ...]) -> list[Any]:
    plain = [_compact(msgspec.to_builtins(artifact)) for artifact in artifacts]
    return [entry["source"] if set(entry) == {"source"} else entry for entry in plain]


def _verifier(spec: VerifierSpec) -> dict[str, Any]:
    separate = spec.grade == "sealed" and not spec.carry_workdir
    site = spec.site
    image = site.image if site is not None and site.image != "host" else None
    return _compact(
        {
            "timeout_sec": spec.timeout_s,
            "user": spec.user,
            "environment_mode": "separate" if separate else None,
            **_network(spec.network, spec.allowed_hosts),
            "env": dict(spec.env),
            "collect": [
                _compact({"command": h.command, "service": h.service, "timeout_sec": h.timeout_s, "user": h.user})
                for h in spec.collect
            ],
            "environment": _environment(site, docker_image=image) if site is not None else None,
        }
    )


def _step(step: Step) -> dict[str, Any]:
    agent = {
        "timeout_sec": step.agent_timeout_s,
        "user": step.agent_user,
        **_network(step.network, step.allowed_hosts),
    }
    return _compact(
        {
            "name": step.name,
            "min_reward": dict(step.min_reward) if step.min_reward is not None else None,
            "artifacts": _artifacts(step.artifacts),
            "agent": _compact(agent),
            "verifier": _verifier(step.verifier) if step.verifier is not None else None,
            "healthcheck": _healthcheck(step.healthcheck),
        }
    )


def _extra(task: Task, root: Path) -> dict[str, Any]:
    """`[metadata.rollyard]`: what the format has no word for, and only where it differs from what loading assumes."""
    spec = task.verifier or next((step.verifier for step in task.steps if step.verifier is not None), None)
    extra: dict[str, Any] = {
        "setup": list(task.setup),
        "layers": list(task.layers),
        "files": [_put(root, number, task) for number in range(len(task.files))],
        "limits": _other_limits(task),
        "pids": task.resources.pids,
    }
    if spec is not None:
        separate = spec.grade == "sealed" and not spec.carry_workdir
        extra |= {
            "grade": spec.grade if spec.grade != ("sealed" if separate else "shared") else None,
            "verifier": spec.kind if spec.kind != "harbor" else None,
            "options": dict(spec.options),
            "verifier_layers": list(spec.layers),
            "safe_path": None if spec.safe_path else False,
        }
    return _compact(extra)


def _put(root: Path, number: int, task: Task) -> dict[str, Any]:
    file = task.files[number]
    place = Path("environment") / "files" / f"{number:03d}-{Path(file.path).name}"
    target = root / place
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.data is not None:
        target.write_bytes(file.data)
    elif file.source is not None and Path(file.source).is_dir():
        shutil.copytree(file.source, target, symlinks=True)
    elif file.source is not None:
        shutil.copy(file.source, target)
    return _compact({"path": file.path, "source": place.as_posix(), "mode": file.mode})


def _other_limits(task: Task) -> dict[str, float]:
    """Limits that no timeout of the format expresses."""
    if task.limits is None:
        return {}
    default, limits = Limits(), msgspec.structs.asdict(task.limits)
    spoken = step_limits(task.steps) if task.steps else {"agent": task.limits.agent}
    if task.verifier is not None and task.verifier.timeout_s is not None:
        spoken["verify"] = task.verifier.timeout_s
    return {n: v for n, v in limits.items() if v is not None and v not in (getattr(default, n), spoken.get(n))}
