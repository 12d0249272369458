"""`load_environment`: a verifiers environment around any agent, taskset, sandbox and verifier. `verifiers_env` is it; that module
needs the package, this one asks for it when an environment is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

Reward = Callable[..., Any]


def load_environment(
    taskset: Any,
    *,
    agent: str = "opencode",
    rewards: Mapping[str, Reward | tuple[Reward, float]] | None = None,
    judged: float = 1.0,
    **options: Any,
) -> Any:
    """`taskset` is what `Taskset.load` takes, `options` what `run_rollout` takes: `sandbox`, `verifier`, `hooks` (image,
    variables and what runs after the agent), limits. The reward is the verifier's, weighed with `judged`, and those of
    `rewards`: functions of verifiers' `trace`, `task` or both, each with its weight. `trace.state.rollout` is the `Rollout`."""
    module = import_module("rollyard.train.verifiers_env")
    return module.make_environment(taskset, agent=agent, rewards=rewards or {}, judged=judged, options=options)
