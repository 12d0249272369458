"""Rollyard runs any CLI coding agent, in any sandbox, on any task; answers every model call the agent makes; and hands back
trajectories whose tokens are exactly the ones the policy sampled, with a reward that can be trusted.

Reading order: `core` (the nouns), `runs/rollout/lifecycle.py` (the one lifecycle), then one file in each package: `wire`, `gate`,
`trajectory`, `policy`, `sandbox`, `agents`, `tasks`, `store`. docs/architecture.md shows how they meet.

The names below are imported on first use, so that `import rollyard` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard.lazy import attach

if TYPE_CHECKING:
    from rollyard import agents as agents
    from rollyard import envs as envs
    from rollyard import plane as plane
    from rollyard import policy as policy
    from rollyard import sandbox as sandbox
    from rollyard import tools as tools
    from rollyard import train as train
    from rollyard.core.errors import Error as Error
    from rollyard.core.limits import Limits as Limits
    from rollyard.core.rollout import Rollout as Rollout
    from rollyard.core.rollout import Verdict as Verdict
    from rollyard.core.sandbox import Mount as Mount
    from rollyard.core.sandbox import Resources as Resources
    from rollyard.core.sandbox import SandboxSpec as SandboxSpec
    from rollyard.core.task import Task as Task
    from rollyard.envs.env import Env as Env
    from rollyard.envs.env import StepResult as StepResult
    from rollyard.gate.gate import Gate as Gate
    from rollyard.runs.branch import branch as branch
    from rollyard.runs.envs import TaskEnv as TaskEnv
    from rollyard.runs.report.report import report as report
    from rollyard.runs.rollout.run_rollout import run_rollout as run_rollout
    from rollyard.runs.run.evaluate import evaluate as evaluate
    from rollyard.runs.run.run import Run as Run
    from rollyard.runs.run.run_tasks import run as run
    from rollyard.store.exports.export import export as export
    from rollyard.store.store import Store as Store
    from rollyard.tasks.taskset import Taskset as Taskset
    from rollyard.tasks.verifiers.python import verifier as verifier
    from rollyard.trajectory.samples import samples as samples
else:
    __getattr__, __dir__ = attach(__name__)  # hidden from type checkers, to which a misspelt name is an error

__version__ = "0.1.0"
