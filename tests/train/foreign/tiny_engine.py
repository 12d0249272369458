"""A tiny model of random weights that answers agents' calls: in turn it solves the task and does not, so that a group
has rewards to learn from, and the logprobs of what it says are its own."""

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
    """Without a model, for who only reads rows, every logprob is -0.5."""

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
        return ids, [-0.5] * len(ids) if self.net is None else logprobs(self.net, prompt, ids).tolist()

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


def grpo_step(net, rows, advantages):
    """One step of the policy gradient on (ids, mask, logprobs) rows, for trainers whose own optimiser wants a GPU."""
    total = 0.0
    for (ids, mask, said), advantage in zip(rows, advantages, strict=True):
        whole, kept = torch.tensor([ids]), torch.tensor(mask[1:]).bool()
        scores = net(input_ids=whole).logits[0, :-1].float().log_softmax(-1)
        new = scores.gather(-1, whole[0, 1:, None])[:, 0]
        old = torch.tensor(said[1:])
        gap = (new.detach() - old)[kept].abs().max()
        assert gap < 1e-3, f"the logprobs of the rollouts are not the model's: {gap}"
        total = total - float(advantage) * (new - old).exp()[kept].mean()
    total.backward()
    torch.optim.SGD(net.parameters(), lr=0.5).step()


def byte_tokenizer():
    """One token per byte, under the ids of the renderer of bytes."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    # Bytes that stand for themselves in a byte-level alphabet
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [one for one in range(256) if one not in shown]
    letters = {chr(one): one for one in shown} | {chr(256 + n): one for n, one in enumerate(hidden)}
    inner = Tokenizer(BPE(vocab=letters | {f"<{n}>": n for n in range(256, VOCABULARY)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=f"<{PAD}>", eos_token=f"<{END}>")
