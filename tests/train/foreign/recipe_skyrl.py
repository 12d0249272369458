"""Runs in an environment with SkyRL, as the entry point of its recipe: its own parser and checks take the options."""

import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils import validate_cfg

cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
validate_cfg(cfg)
assert cfg.trainer.override_entrypoint == "rollyard.train.plugins.skyrl"
assert (cfg.generator.n_samples_per_prompt, cfg.trainer.algorithm.advantage_estimator) == (8, "grpo")
print("ok")
