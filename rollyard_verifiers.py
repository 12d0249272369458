"""`rollyard.train.verifiers` under a name without dots, which is what verifiers' configurations take:
`vf-eval rollyard-verifiers --env.taskset.source tasks/`."""

from rollyard.train.verifiers import load_environment
from rollyard.train.verifiers_env import VerifiersEnv, VerifiersHarness, VerifiersTaskset

__all__ = ["VerifiersEnv", "VerifiersHarness", "VerifiersTaskset", "load_environment"]
