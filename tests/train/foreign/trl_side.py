"""Runs in an environment with TRL: a real `GRPOTrainer` takes two steps on our rows, and the asynchronous trainer's own queue
reader takes what our worker makes."""

import sys
import tempfile
import warnings
from collections import defaultdict
from itertools import islice

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rollyard.train.adapters.trl import env_reward, rollout_rows
from tests.train.rollouts import branchy, linear, unprovable, unscored

VOCABULARY = 64


def tokenizer():
    words = {"<pad>": 0, "<eos>": 63, **{f"w{n}": n for n in range(1, 63)}}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=63,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def two_steps():
    asked = []

    def rollout_func(prompts, trainer):
        made = [branchy() if n % 2 else linear() for n in range(len(prompts))]
        if asked:
            made[0] = unscored()
        asked.append(len(prompts))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return rollout_rows(made, pad_id=0)

    net = model()
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    with tempfile.TemporaryDirectory() as out:
        arguments = GRPOConfig(
            output_dir=out, per_device_train_batch_size=4, num_generations=2, max_steps=2, learning_rate=1e-2,
            logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", max_completion_length=16, bf16=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=net, args=arguments, reward_funcs=env_reward, processing_class=tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["w1 w2 w3"] * 4}), rollout_func=rollout_func,
        )  # fmt: skip
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert asked == [4, 4], asked
    assert trainer.state.global_step == 2
    assert logs[0]["reward"] == 0.5, logs[0]
    assert any(not torch.equal(before[name], value) for name, value in net.named_parameters()), "nothing was trained"
    assert all(torch.isfinite(value).all() for value in net.parameters())


def worker():
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

    from rollyard.core.errors import Untrainable
    from rollyard.train.trl_worker import RolloutWorker

    async def group(number, version):
        return [linear(), branchy(), unscored()] if number < 2 else [unprovable()]

    made = RolloutWorker(group, parallel=1, buffer=3)
    made.update_model_version(5)
    made.start()
    reader = RolloutQueueDataset(
        made.rollout_buffer, lambda: 5, made.check_health, 30.0, defaultdict(list), max_staleness=4, poll_interval_s=0.2
    )
    rows = iter(reader)
    taken = list(islice(rows, 10))
    assert [row["group_id"] for row in taken] == [0] * 5 + [1] * 5
    assert [row["advantage"] for row in taken[:5]] == [1.0, -1.0, -1.0, -1.0, -1.0]
    assert [int(row["completion_mask"].sum()) for row in taken[:5]] == [5, 2, 3, 2, 1]
    assert all(len(row["input_ids"]) == len(row["completion_mask"]) == len(row["old_log_probs"]) for row in taken)
    try:
        next(rows)
    except BaseExceptionGroup as group_of:
        assert group_of.subgroup(Untrainable) is not None
    else:
        raise AssertionError("an untrainable rollout went by in silence")
    assert made.metrics_queue.get_nowait() == {"rollyard/rows": 5.0, "rollyard/unscored": 1.0}
    made.stop()


{"two_steps": two_steps, "worker": worker}[sys.argv[1]]()
print("ok")
