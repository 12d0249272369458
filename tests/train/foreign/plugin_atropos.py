"""Runs in an environment with atroposlib: its own API server hands the groups of our environment to a trainer."""

import asyncio
import json
import sys
import threading
from pathlib import Path
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parent))

import uvicorn
from atroposlib.api.server import app

from rollyard.net.binding import listen
from rollyard.train.plugins.atropos import AtroposEnvironment
from rollyard.train.plugins.served_rollouts import ServedRollouts

(url,) = sys.argv[1:]
TASK = {"id": "hello", "instruction": "write hello to out.txt", "verify": ["test -f out.txt"]}


def ask(api, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(api + path, data, {"content-type": "application/json"}), timeout=30) as answer:
        return json.load(answer)


with listen("127.0.0.1", 0) as sock:
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True).start()
    api = f"http://127.0.0.1:{sock.getsockname()[1]}"
    trainer = {"wandb_group": "g", "wandb_project": "p", "batch_size": 2, "max_token_len": 4096}
    rest = {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1}
    ask(api, "/register", {**trainer, **rest})
    ask(api, "/batch")  # a trainer that asks has started
    asyncio.run(AtroposEnvironment(api, ServedRollouts(url), [TASK], group_size=2).run(groups=1))
    (group,) = ask(api, "/batch")["batch"]
    server.should_exit = True
assert group["scores"] == [1.0, 1.0] and len(group["tokens"]) == 2
for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
    assert all(one in (-100, token) for one, token in zip(mask, tokens, strict=True)) and set(mask) != {-100}
print("ok")
