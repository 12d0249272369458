"""Runs in an environment with AWS's toolkit: its app runs our entry point; what it would write to S3 is kept here."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["AWS_DEFAULT_REGION"] = "us-west-2"

from agentcore_rl_toolkit import AgentCoreRLApp
from gateway import TASK, UNJUDGED, Gateway, gateway
from starlette.testclient import TestClient

from rollyard.train.plugins.agentcore import entrypoint

saved = []


class App(AgentCoreRLApp):
    def save_result(self, result, rollout_config, result_key, payload=None):
        saved.append(result)


app = App()
app.rollout_entrypoint(entrypoint("shell-agent"))
with gateway() as url, TestClient(app) as http:
    stored = {"exp_id": "e", "input_id": "i", "s3_bucket": "b", "session_id": "s"}
    rollout = {**stored, "base_url": f"{url}/v1", "model_id": "m", "api_key": "secret"}
    for number, task in enumerate((TASK, UNJUDGED), 1):
        answer = http.post("/invocations", json={"task": task, "_rollout": rollout}).raise_for_status().json()
        assert answer["status"] == "processing", answer
        for _ in range(1200):
            if len(saved) == number:
                break
            time.sleep(0.1)
assert saved[0]["rewards"] == [1.0], saved
assert saved[1]["status_code"] == 500 and "no verdict" in saved[1]["stop_reason"], saved
assert {(key, model) for _, key, model in Gateway.asked} == {("Bearer secret", "m")}
print("ok")
