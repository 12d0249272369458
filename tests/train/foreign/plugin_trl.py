"""Runs in an environment with TRL: its `GRPOTrainer` trains on rollouts of a server, with and without its own
generation, and the asynchronous trainer's reader drains our worker."""

import sys
import tempfile
from collections import defaultdict
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from datasets import Dataset
from tiny_engine import TASK, TinyEngine, byte_tokenizer, model, moved, weights
from trl import GRPOConfig, GRPOTrainer

from rollyard.train.plugins.trl import RolloutFunction, ServedWorker, env_reward

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


def worker():
    from accelerate import PartialState
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

    PartialState()  # their log wants it
    engine = TinyEngine(model())
    made = ServedWorker([TASK], url, attempts=2, generate=engine.generate, parallel=1, buffer=4)
    made.update_model_version(5)
    made.start()
    reader = RolloutQueueDataset(
        made.rollout_buffer, lambda: 5, made.check_health, 60.0, defaultdict(list), max_staleness=4, poll_interval_s=0.2
    )
    taken = list(islice(iter(reader), 4))
    made.stop()
    assert [row["group_id"] for row in taken] == [0, 0, 1, 1]
    assert sorted(row["advantage"] for row in taken[:2]) == [-1.0, 1.0]
    assert all(len(row["input_ids"]) == len(row["completion_mask"]) == len(row["old_log_probs"]) for row in taken)
    assert all(int(row["completion_mask"].sum()) > 30 for row in taken)


{"step": step, "own_generation": own_generation, "worker": worker}[part]()
print("ok")
