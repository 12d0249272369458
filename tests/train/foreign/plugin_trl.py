"""Runs in an environment with TRL: its `GRPOTrainer` trains on rollouts of a server, with and without its own
generation, and the asynchronous trainer's reader drains our worker."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from datasets import Dataset
from tiny_engine import TASK, TinyEngine, byte_tokenizer, model, moved, weights
from trl import GRPOConfig, GRPOTrainer

from rollyard.train.plugins.trl import RolloutFunction, env_reward

part, url = sys.argv[1:]


def train(net, rollouts):
    with tempfile.TemporaryDirectory() as out:
        arguments = GRPOConfig(
            output_dir=out, per_device_train_batch_size=4, num_generations=4, max_steps=1, learning_rate=1e-2,
            logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", max_completion_length=16, bf16=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=net, args=arguments, reward_funcs=env_reward, processing_class=byte_tokenizer(),
            train_dataset=Dataset.from_list(rollouts.dataset() * 4), rollout_func=rollouts,
        )  # fmt: skip
        trainer.train()
    (log,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    return log


def step():
    net = model()
    before, engine = weights(net), TinyEngine(net)
    log = train(net, RolloutFunction([TASK], url, generate=engine.generate))
    assert log["reward"] == 0.5, log
    assert engine.answered == 8
    assert moved(net, before), "nothing was trained"


def own_generation():
    """What a model of random weights says calls no tool: the rollouts end, and none is solved."""
    net = model()
    log = train(net, RolloutFunction([TASK], url))
    assert log["reward"] == 0.0, log


{"step": step, "own_generation": own_generation}[part]()
print("ok")
