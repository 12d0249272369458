"""Runs in an environment with verifiers: the environment of prime-rl's recipe is one that verifiers loads."""

import sys
import tomllib
from pathlib import Path

from rollyard.train.verifiers_env import EnvironmentConfig, VerifiersHarnessConfig, VerifiersTasksetConfig

file = tomllib.loads(Path(sys.argv[1]).read_text())
(source,) = file["orchestrator"]["train"]["source"]
env = source["env"]
assert EnvironmentConfig.model_validate({name: env[name] for name in ("taskset", "agent")})
assert VerifiersTasksetConfig.model_validate(env["taskset"]).source == "../tasks.jsonl"
assert VerifiersHarnessConfig.model_validate(env["agent"]["harness"]).agent == "opencode"
print("ok")
