"""A tiny model of random weights that answers agents' calls: in turn it solves the task and does not, so that a group has rewards to
learn from, and the logprobs of what it says are its own."""

import json

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

END, PAD, VOCABULARY = 261, 256, 288  # of the renderer of bytes
TASK = {"id": "hello", "instruction": "write hello to out.txt", "verify": ["test -f out.txt"]}
SOLVES, IDLE = "echo hello > out.txt", "true"


def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


class TinyEngine:
    def __init__(self, net):
        self.net, self.begun, self.answered = net, 0, 0

    def sample(self, prompt):
        """Ids and logprobs: a call of the shell first, and an end once the prompt holds one."""
        self.answered += 1
        said = bytes(one for one in prompt if one < 256).decode(errors="replace")
        text = "done"
        if not any(f'"command": "{one}"' in said for one in (SOLVES, IDLE)):
            command = SOLVES if self.begun % 2 == 0 else IDLE
            self.begun += 1
            text = f"<tool_call>\n{json.dumps({'name': 'shell', 'arguments': {'command': command}})}\n</tool_call>"
        ids = [*text.encode(), END]
        return ids, logprobs(self.net, prompt, ids).tolist()

    async def generate(self, calls):
        from rollyard.train.plugins.served_rollouts import Generation

        return [Generation(*self.sample(call["prompt_ids"]), 0) for call in calls]


@torch.no_grad()
def logprobs(net, prompt, ids):
    whole = torch.tensor([[*prompt, *ids]])
    logits = net(input_ids=whole).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def weights(net):
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def moved(net, before):
    assert all(torch.isfinite(value).all() for value in net.parameters()), "weights are no numbers any more"
    return any(not torch.equal(before[name], value) for name, value in net.named_parameters())
