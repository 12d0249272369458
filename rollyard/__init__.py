"""Rollyard runs any CLI coding agent, in any sandbox, on any task; answers every model call the agent makes; and hands back
trajectories whose tokens are exactly the ones the policy sampled, with a reward that can be trusted.

Reading order: `core` (the nouns), `runs/rollout/lifecycle.py` (the one lifecycle), then one file in each package: `wire`, `gate`,
`trajectory`, `policy`, `sandbox`, `agents`, `tasks`, `store`. docs/architecture.md shows how they meet.

Names below are imported on first use, so that `import rollyard` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard import agents as agents
    from rollyard import envs as envs
    from rollyard import gate as gate
    from rollyard import plane as plane
    from rollyard import policy as policy
    from rollyard import tools as tools
    from rollyard import train as train
    from rollyard.core.errors import Error as Error
    from rollyard.core.limits import Limits as Limits
    from rollyard.core.message import Message as Message
    from rollyard.core.rollout import Rollout as Rollout
    from rollyard.core.rollout import Verdict as Verdict
    from rollyard.core.sandbox import Capabilities as Capabilities
    from rollyard.core.sandbox import Exit as Exit
    from rollyard.core.sandbox import Mount as Mount
    from rollyard.core.sandbox import Resources as Resources
    from rollyard.core.sandbox import SandboxSpec as SandboxSpec
    from rollyard.core.task import Task as Task
    from rollyard.envs.env import Env as Env
    from rollyard.envs.env import StepResult as StepResult
    from rollyard.gate.gate import Gate as Gate
    from rollyard.gate.limits import Budget as Budget
    from rollyard.images.store import ImageStore as ImageStore
    from rollyard.images.store import layer as layer
    from rollyard.inside.plain_env import serve_tools as serve_tools
    from rollyard.policy.renderers.load import renderer as renderer
    from rollyard.runs.envs import TaskEnv as TaskEnv
    from rollyard.runs.report.report import report as report
    from rollyard.runs.rollout.run_rollout import run_rollout as run_rollout
    from rollyard.runs.run.config import RunConfig as RunConfig
    from rollyard.runs.run.evaluate import evaluate as evaluate
    from rollyard.runs.run.evaluate import evaluate_task as evaluate_task
    from rollyard.runs.run.fleet_job import FleetJob as FleetJob
    from rollyard.runs.run.run import Run as Run
    from rollyard.store.exports.export import export as export
    from rollyard.store.store import Store as Store
    from rollyard.tasks.taskset import Taskset as Taskset
    from rollyard.tasks.verifiers.python import verifier as verifier
    from rollyard.tools.tool import tool as tool
    from rollyard.tools.toolset import Toolset as Toolset
    from rollyard.trajectory.samples import samples as samples

__version__ = "0.1.0"

# public name -> module that holds it
_NAMES: dict[str, str] = {
    "renderer": "rollyard.policy.renderers.load",
    "Error": "rollyard.core.errors",
    "serve_tools": "rollyard.inside.plain_env",
    "Limits": "rollyard.core.limits",
    "Resources": "rollyard.core.sandbox",
    "SandboxSpec": "rollyard.core.sandbox",
    "Mount": "rollyard.core.sandbox",
    "Exit": "rollyard.core.sandbox",
    "Capabilities": "rollyard.core.sandbox",
    "Message": "rollyard.core.message",
    "Task": "rollyard.core.task",
    "Taskset": "rollyard.tasks.taskset",
    "Rollout": "rollyard.core.rollout",
    "Verdict": "rollyard.core.rollout",
    "run_rollout": "rollyard.runs.rollout.run_rollout",
    "Run": "rollyard.runs.run.run",
    "Store": "rollyard.store.store",
    "RunConfig": "rollyard.runs.run.config",
    "report": "rollyard.runs.report.report",
    "export": "rollyard.store.exports.export",
    "evaluate": "rollyard.runs.run.evaluate",
    "evaluate_task": "rollyard.runs.run.evaluate",
    "FleetJob": "rollyard.runs.run.fleet_job",
    "samples": "rollyard.trajectory.samples",
    "ImageStore": "rollyard.images.store",
    "layer": "rollyard.images.store",
    "verifier": "rollyard.tasks.verifiers.python",
    "Gate": "rollyard.gate.gate",
    "Budget": "rollyard.gate.limits",
    "tool": "rollyard.tools.tool",
    "Toolset": "rollyard.tools.toolset",
    "Env": "rollyard.envs.env",
    "StepResult": "rollyard.envs.env",
    "TaskEnv": "rollyard.runs.envs",
}
_ROOMS = ("agents", "core", "envs", "gate", "plane", "policy", "sandbox", "tools", "train")


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    elif name in _ROOMS:
        value = import_module(f"rollyard.{name}")
    else:
        raise AttributeError(f"module 'rollyard' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_NAMES, *_ROOMS])
