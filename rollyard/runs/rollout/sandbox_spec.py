"""What a task's sandbox is opened with: the image and its defaults, the task's own settings, labels that name the rollout."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rollyard.core.limits import Limits
from rollyard.core.sandbox import Network, SandboxSpec
from rollyard.core.task import Task
from rollyard.images.build_types import Built
from rollyard.runs.rollout.plan import RolloutPlan
from rollyard.tasks.host_variables import resolve_env
from rollyard.tasks.trust import readable_variables


def task_spec(
    task: Task, built: Built, layers: tuple[str, ...], *, labels: Mapping[str, str], limits: Limits
) -> SandboxSpec:
    """The place a task describes, from its pristine image."""
    return SandboxSpec(
        image=built.image,
        layers=layers,
        env={**built.env, **resolve_env(task.env, readable_variables(task), where=f"task {task.id}")},
        workdir=task.workdir or built.workdir or None,
        user=task.user or built.user,
        labels=labels,
        ttl_s=limits.ttl_s,
        boot_s=limits.boot,
        resources=task.resources,
        network=msgspec.convert(task.network or "none", Network),
        allowed_hosts=task.allowed_hosts,
    )


def rollout_spec(plan: RolloutPlan, task: Task, built: Built, layers: tuple[str, ...]) -> SandboxSpec:
    """The sandbox of one rollout, with its labels and its isolation."""
    labels = {"rollyard.task": task.id, "rollyard.rollout": plan.rollout_id, "rollyard.attempt": str(plan.attempt)}
    for name, value in (("run", plan.run_id), ("claim", plan.attempt_id), ("episode", plan.episode_id)):
        if value is not None:
            labels[f"rollyard.{name}"] = value
    spec = task_spec(task, built, layers, labels={**plan.options.labels, **labels}, limits=plan.limits_for(task))
    return msgspec.structs.replace(
        spec,
        ttl_s=spec.ttl_s + (plan.pauses.ttl_s if plan.pauses is not None else 0.0),
        mounts=plan.options.mounts,
        min_isolation=plan.options.min_isolation,
        allow_unsafe=plan.options.allow_unsafe,
        options=plan.options.sandbox_options,
    )
