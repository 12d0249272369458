"""Runs beside a checkout of slime (or of OpenClaw-RL's): its own caller of rollout functions runs ours, with an engine behind HTTP."""

import json
import os
import sys
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), sys.argv[1]]

import torch
from slime.rollout.base_types import call_rollout_fn
from slime.utils.types import Sample
from tiny_engine import TASK, TinyEngine, grpo_step, model, moved, weights

os.environ["ROLLYARD_ROLLOUTS_URL"] = sys.argv[2]
from rollyard.train.plugins.slime import generate_rollout

net = model()
before, tiny = weights(net), TinyEngine(net)


class Router(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/generate" and asked["return_logprob"]
        ids, logprobs = tiny.sample(asked["input_ids"])
        meta = {"output_token_logprobs": [[p, one, None] for one, p in zip(ids, logprobs, strict=True)]}
        body = json.dumps({"text": "", "meta_info": {**meta, "weight_version": "7"}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


class Source:
    def get_samples(self, count):
        assert count == 2
        tasks = (TASK, {"id": "x", "instruction": "no verifier"})
        return [
            [
                Sample(group_index=n, index=4 * n + k, prompt=task["instruction"], metadata={"task": json.dumps(task)})
                for k in range(4)
            ]
            for n, task in enumerate(tasks)
        ]


with ThreadingHTTPServer(("127.0.0.1", 0), Router) as router:
    threading.Thread(target=router.serve_forever, daemon=True).start()
    asked = {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_max_response_len": 512}
    args = Namespace(sglang_router_ip="127.0.0.1", sglang_router_port=router.server_port, rollout_batch_size=2, **asked)
    out = call_rollout_fn(generate_rollout, args, 0, Source(), evaluation=False)
    router.shutdown()
good, unjudged = out.samples
assert sorted(one.reward for one in good) == [0.0, 0.0, 1.0, 1.0]
assert [one.index for one in good] == [0, 1, 2, 3] and all(one.weight_versions == ["7"] for one in good)
assert all(len(one.loss_mask) == len(one.rollout_log_probs) == one.response_length for one in good)
assert all(one.remove_sample and one.status == Sample.Status.ABORTED and not any(one.loss_mask) for one in unjudged)
rewards = torch.tensor([one.reward for one in good])
rows = [
    (one.tokens, [0] * (len(one.tokens) - one.response_length) + one.loss_mask,
     [0.0] * (len(one.tokens) - one.response_length) + one.rollout_log_probs)
    for one in good
]  # fmt: skip
grpo_step(net, rows, rewards - rewards.mean())
assert moved(net, before), "nothing was trained"
print("ok")
