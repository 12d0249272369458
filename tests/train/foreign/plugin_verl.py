"""Runs in an environment with verl: its own `AgentLoopWorker` runs our loop, and its GRPO advantage and loss move a model."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from tiny_engine import TASK, TinyEngine, byte_tokenizer, model, moved, weights
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from verl.workers.rollout.replica import TokenOutput

(url,) = sys.argv[1:]
net = model()
before, tiny = weights(net), TinyEngine(net)


class Server:
    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        assert sampling_params["logprobs"] and request_id
        ids, logprobs = tiny.sample(prompt_ids)
        return TokenOutput(token_ids=ids, log_probs=logprobs, extra_fields={"global_steps": 3})


def config(folder):
    net.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    loops = Path(folder, "loops.yaml")
    target = "rollyard.train.plugins.verl.AgentLoop"
    loops.write_text(f"- name: rollyard\n  _target_: {target}\n  url: {url}\n")
    import verl.trainer

    with initialize_config_dir(str(Path(verl.trainer.__file__).parent / "config"), version_base=None):
        rollout = "actor_rollout_ref.rollout"
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={folder}",
                f"{rollout}.name=vllm",
                f"{rollout}.prompt_length=2048",
                f"{rollout}.response_length=1024",
                f"{rollout}.agent.agent_loop_config_path={loops}",
                f"{rollout}.agent.default_agent_loop=rollyard",
            ],
        )


def step(batch):
    """One step of GRPO as verl computes it, with its functions, on what its worker made."""
    whole, mask = batch.batch["input_ids"], batch.batch["response_mask"].float()
    size = mask.shape[1]
    groups = np.array(["g"] * len(whole))
    advantages, _ = compute_grpo_outcome_advantage(batch.batch["rm_scores"], mask, groups)
    logits = net(input_ids=whole, attention_mask=batch.batch["attention_mask"]).logits[:, -size - 1 : -1]
    new = logits.log_softmax(-1).gather(-1, batch.batch["responses"][..., None])[..., 0]
    from verl.workers.config import ActorConfig

    actor = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=4)
    loss, *_ = compute_policy_loss_vanilla(batch.batch["rollout_log_probs"], new, advantages, mask, config=actor)
    gap = ((new.detach() - batch.batch["rollout_log_probs"]).abs() * mask).max()
    assert gap < 1e-3, f"the logprobs of the rollouts are not the model's: {gap}"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    loss.backward()
    optimizer.step()


with tempfile.TemporaryDirectory() as folder:
    worker = AgentLoopWorker(config(folder), Server())
    task = np.array([json.dumps(TASK)] * 4, dtype=object)
    raw = np.array([[{"role": "user", "content": TASK["instruction"]}]] * 4, dtype=object)
    batch = DataProto.from_dict(non_tensors={"task": task, "raw_prompt": raw})
    made = asyncio.run(worker.generate_sequences(batch))
assert sorted(made.batch["rm_scores"].sum(-1).tolist()) == [0.0, 0.0, 1.0, 1.0]
assert made.non_tensor_batch["min_global_steps"].tolist() == [3] * 4
step(made)
assert moved(net, before), "nothing was trained"
print("ok")
