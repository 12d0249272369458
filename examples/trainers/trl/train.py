"""GRPO with TRL on rollouts of a server: `accelerate launch train.py --config config.yaml --tasks ../tasks.jsonl`."""

import json
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser

from rollyard.train.plugins.trl import RolloutFunction, env_reward


@dataclass
class Recipe:
    tasks: str = "../tasks.jsonl"
    dry_run: bool = False


recipe, arguments, model = TrlParser((Recipe, GRPOConfig, ModelConfig)).parse_args_and_config()
rollouts = RolloutFunction([json.loads(line) for line in Path(recipe.tasks).read_text().splitlines() if line.strip()])
if recipe.dry_run:
    print(f"{len(rollouts.dataset())} tasks, groups of {arguments.num_generations}, {arguments.max_steps} steps")
else:
    GRPOTrainer(
        model=model.model_name_or_path,
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
        train_dataset=Dataset.from_list(rollouts.dataset()),
        rollout_func=rollouts,
        reward_funcs=env_reward,
    ).train()
