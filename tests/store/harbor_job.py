"""Run by a Python that has the real Harbor: a job of two trials, written by its own models. `python harbor_job.py FOLDER`"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from harbor.models.agent.context import AgentContext
from harbor.models.task.id import LocalTaskId
from harbor.models.trajectories import Agent, Metrics, Observation, ObservationResult, Step, ToolCall, Trajectory
from harbor.models.trial.config import AgentConfig, TaskConfig, TrialConfig
from harbor.models.trial.result import AgentInfo, ModelInfo, TrialResult
from harbor.models.verifier.result import VerifierResult

job = Path(sys.argv[1])
for name, reward in (("hello__aaaaaaa", 1.0), ("hello__bbbbbbb", 0.0)):
    task = LocalTaskId(path=Path("/tasks/hello"))
    result = TrialResult(
        task_name="hello",
        trial_name=name,
        trial_uri="file:///x",
        task_id=task,
        task_checksum="0",
        config=TrialConfig(task=TaskConfig(path=Path("/tasks/hello")), agent=AgentConfig(name="codex")),
        agent_info=AgentInfo(name="codex", version="1", model_info=ModelInfo(name="m", provider="p")),
        agent_result=AgentContext(),
        verifier_result=VerifierResult(rewards={"reward": reward}),
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        finished_at=datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC),
    )
    (job / name / "agent").mkdir(parents=True)
    (job / name / "result.json").write_text(result.model_dump_json(indent=4))
    call = ToolCall(tool_call_id="a", function_name="sh", arguments={"cmd": "ls"})
    seen = Observation(results=[ObservationResult(source_call_id="a", content="file")])
    steps = [
        Step(step_id=1, source="user", message="greet"),
        Step(
            step_id=2, source="agent", message="", tool_calls=[call], observation=seen, metrics=Metrics(prompt_tokens=7)
        ),
        Step(step_id=3, source="agent", message="done"),
    ]
    document = Trajectory(session_id="s", agent=Agent(name="codex", version="1", model_name="m"), steps=steps)
    (job / name / "agent" / "trajectory.json").write_text(json.dumps(document.to_json_dict()))
print(json.dumps({}))
