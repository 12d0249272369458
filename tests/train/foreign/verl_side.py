"""Runs in an environment with verl: its `AgentLoopOutput` takes our fields and makes the tensors its trainer reads."""

import json
import sys
from pathlib import Path

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

made = []
for fields in json.loads(Path(sys.argv[1], "verl.json").read_text()):
    unknown = set(fields) - set(AgentLoopOutput.model_fields)
    tensors = AgentLoopOutput(**fields).as_dict()
    names = ("prompts", "responses", "response_mask", "rollout_log_probs")
    made.append({name: tensors[name].tolist() for name in names} | {"unknown": sorted(unknown)})
print(json.dumps(made))
