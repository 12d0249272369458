"""Runs in an environment with atroposlib: its own server takes our group and hands it to a trainer as a batch."""

import json
import sys
from pathlib import Path

from atroposlib.api.server import app
from starlette.testclient import TestClient

group = json.loads(Path(sys.argv[1], "atropos.json").read_text())
size = len(group["tokens"])
with TestClient(app) as http:
    trainer = {"wandb_group": "g", "wandb_project": "p", "batch_size": size, "max_token_len": 4096}
    rest = {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1}
    http.post("/register", json={**trainer, **rest}).raise_for_status()
    http.get("/batch").raise_for_status()  # a trainer that asks has started
    named = {"max_token_length": 4096, "desired_name": "rollyard", "weight": 1.0, "group_size": size}
    env = http.post("/register-env", json=named).raise_for_status().json()
    sent = http.post("/scored_data", json={**group, "env_id": env["env_id"]}).raise_for_status().json()
    batch = http.get("/batch").raise_for_status().json()["batch"]
print(json.dumps({"status": sent["status"], "batch": batch}))
