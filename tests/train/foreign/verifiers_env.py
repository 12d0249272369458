"""Runs in an environment with verifiers: our rollouts as its environment, by a client of OpenAI's, with a model server of a few
lines that has the agent write a file."""

import asyncio
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import verifiers.v1 as vf
from openai import AsyncOpenAI

from rollyard.runs.rollout.plan import Hooks
from rollyard.train.verifiers import load_environment

WRITE = {"name": "shell", "arguments": json.dumps({"command": 'echo "hello $WHO" > out.txt'})}
TURNS = [{"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": WRITE}]}, {"content": "done"}]


class Model(BaseHTTPRequestHandler):
    keys: set = set()

    def do_POST(self):
        self.keys.add(self.headers["authorization"])
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turn = sum(message["role"] == "assistant" for message in asked["messages"])
        choice = {
            "index": 0,
            "message": {"role": "assistant", **TURNS[turn]},
            "finish_reason": ["tool_calls", "stop"][turn],
        }
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        told = {"id": "x", "object": "chat.completion", "created": 1, "model": asked["model"]}
        body = json.dumps({**told, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


def verify(command):
    return {"kind": "commands", "options": {"commands": [command]}}


TASKS = [
    {"id": "good", "instruction": "say hello", "verifier": verify('test "$(cat out.txt)" = "hello you"')},
    {"id": "bad", "instruction": "say goodbye", "verifier": verify("grep goodbye out.txt")},
    {"id": "none", "instruction": "say nothing"},
]
seen = []


def short(trace):
    return 1.0 if len(trace.nodes) < 10 else 0.0


async def asked(task, trace):
    return float(trace.state.rollout.task.instruction == task.prompt)


def after(sandbox, rollout):
    seen.append(rollout.task.id)


hooks = Hooks(variables=(lambda task: {"WHO": "you"},), after_agent=(after,))
env = load_environment(
    TASKS, agent="shell-agent", sandbox="local", hooks=hooks, rewards={"short": (short, 0.5), "asked": (asked, 0.25)}
)
assert isinstance(env, vf.Env) and [row["prompt"] for row in env.dataset] == [task["instruction"] for task in TASKS]
server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="the-key")
episodes = asyncio.run(env.evaluate(client, "m", rollouts_per_example=2, max_concurrent=2))
found = {}
for episode in episodes:
    (trace,) = episode.traces
    errors = [error.message for error in (*episode.errors, *trace.errors)]
    found.setdefault(trace.info["rollyard"]["task_id"], []).append((episode.ok, trace.reward, len(trace.calls), errors))
good, bad, none = found["good"], found["bad"], found["none"]
assert good == [(True, 1.75, 2, [])] * 2, good
assert bad == [(True, 0.75, 2, [])] * 2, bad
assert all(not ok and "there is no verdict: the task has no verifier" in errors[0] for ok, _, _, errors in none), none
assert sorted(seen) == sorted(["good", "bad", "none"] * 2)
assert Model.keys == {"Bearer the-key"}
assert [name for name in os.environ if name.startswith("ROLLYARD_VERIFIERS_KEY")] == [], "the key goes with the call"
print("ok")
