"""Run by a Python with the real Harbor: what its models and its viewer find in a job folder. `python harbor_reads.py FOLDER`"""

import json
import sys
from pathlib import Path

from harbor.models.trajectories import Trajectory
from harbor.viewer.scanner import JobScanner

job = Path(sys.argv[1])
scanner = JobScanner(job.parent)
whole = scanner.get_job_result(job.name)
trials = [scanner.get_trial_result(job.name, name) for name in scanner.list_trials(job.name)]
steps = {
    trial.trial_name: len(Trajectory.model_validate_json(path.read_text()).steps)
    for trial in trials
    if (path := job / trial.trial_name / "agent" / "trajectory.json").exists()
}
found = [
    {
        "task": trial.task_name,
        "agent": trial.agent_info.name,
        "model": trial.config.agent.model_name,
        "rewards": trial.verifier_result and trial.verifier_result.rewards,
        "valid": trial.reward_valid,
        "error": trial.exception_info and trial.exception_info.exception_type,
        "tokens": trial.compute_token_cost_totals()[:3],
        "steps": steps.get(trial.trial_name, 0),
    }
    for trial in trials
]
print(
    json.dumps(
        {
            "jobs": scanner.list_jobs(),
            "trials": found,
            "total": whole.n_total_trials,
            "errors": whole.stats.n_errored_trials,
        }
    )
)
