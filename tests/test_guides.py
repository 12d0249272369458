"""The guides, each read top to bottom and typed as a reader would: a block with a title is a file, a block of `sh` is typed line
by line, and every line must succeed."""

import contextlib
import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)```", re.S)
FIX = {"name": "shell", "arguments": json.dumps({"command": "sed -i s/World/Rollyard/ greeting.txt"})}


def follow(page, folder, changes=(), **env):
    """What each command printed, by its line."""
    text = (DOCS / page).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env}
    printed = {}
    for language, title, body in BLOCK.findall(text):
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(body)
        elif language == "sh":
            for line in body.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                printed[line] = done.stdout
        else:
            raise AssertionError(f"a block of {language} without a title is neither saved nor run")
    return printed


@contextlib.contextmanager
def model_server(model, key):
    """A server with one model and one key; it solves the task that `init` makes."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.tell({"object": "list", "data": [{"id": model, "object": "model"}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            fixed = asked["messages"][-1]["role"] == "tool" or not asked.get("tools")
            call = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": FIX}]}
            message = {"role": "assistant", "content": "done"} if fixed else {**call, "content": None}
            choice = {"index": 0, "message": message, "finish_reason": "stop" if fixed else "tool_calls"}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            answer = {"id": "1", "object": "chat.completion", "created": 1, "model": model, "choices": [choice]}
            self.tell({**answer, "usage": usage}, asked["model"] == model)

        def tell(self, value, known=True):
            allowed = self.headers.get("authorization") == f"Bearer {key}"
            found = known and self.path.startswith("/v1/") and not self.path.startswith("/v1/v1")
            status = 401 if not allowed else 200 if found else 404
            body = json.dumps(value if status == 200 else {"error": {"message": f"no: {self.path}"}}).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.agent
@pytest.mark.slow
def test_the_quickstart(tmp_path):
    printed = follow("quickstart.md", tmp_path)
    verbs = "doctor demo init check init run list list show check grep why eval export hello.py"
    assert [shlex.split(line)[1] for line in printed] == verbs.split()
    assert printed["python hello.py"].strip() == "completed 1.0 1"
    assert (tmp_path / "report" / "report.html").exists()
    rows = [msgspec.json.decode(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert rows and all(row["reward"] == 1.0 and row["input_ids"] for row in rows)


@pytest.mark.slow
def test_two_models_with_a_key_each(tmp_path):
    with model_server("small-8b", "key-of-small") as small, model_server("large-70b", "key-of-large") as large:
        changes = [("http://localhost:8001/v1", small), ("http://localhost:8002/v1", large)]
        printed = follow("two-models.md", tmp_path, changes, SMALL_KEY="key-of-small", LARGE_KEY="key-of-large")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert "key-of" not in (tmp_path / "report" / "report.html").read_text()
    assert {one["name"]: one["reward"]["value"] for one in report["lines"]} == {
        "shell-agent / small": 1.0, "shell-agent / large": 1.0,
    }  # fmt: skip
    assert "large" in printed["rollyard compare last@small last@large"]


@pytest.mark.slow
def test_a_task_from_nothing(tmp_path):
    printed = follow("own-task.md", tmp_path)
    assert "every rollout of the run has the reward 1" in printed["rollyard why first-try"]


@pytest.mark.slow
def test_an_agent_from_nothing(tmp_path):
    printed = follow("own-agent.md", tmp_path)
    assert "every rollout of the run has the reward 1" in printed["rollyard why tiny"]


@pytest.mark.parametrize("steps", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_reinforcement_learning_in_50_lines(tmp_path, steps):
    printed = follow("rl-in-50-lines.md", tmp_path, [("STEPS = 8\n", f"STEPS = {steps}\n")])
    lines = printed["python rl.py"].splitlines()
    assert len(lines) == steps and all("chance of 7" in line for line in lines)
    assert len((tmp_path / "rl.py").read_text().splitlines()) <= 60, "it says 50 lines"
    if steps > 1:  # ten equal chances: all eight steps of eight attempts miss in one case of a thousand
        assert float(lines[-1].split()[-1]) > 0.1
