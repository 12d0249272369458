"""An agent in a TOML file says by a small table which of its lines are which events, and passes the suite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard import agents
from rollyard.core.agent import Agent, EventRule
from rollyard.core.errors import ConfigError

PROGRAM = """
import json, os, subprocess, sys, urllib.request

parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
tool = {"type": "function", "function": {"name": "shell", "parameters": parameters}}
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    body = json.dumps({"model": "m", "messages": messages, "tools": [tool]}).encode()
    head = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(os.environ["URL"] + "/chat/completions", body, head))
    message = json.load(answer)["choices"][0]["message"]
    messages.append(message)
    print("a line for people")
    print(json.dumps({"type": "said", "part": [{"text": message.get("content") or ""}]}))
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        print(json.dumps({"type": "call", "id": call["id"], "name": "shell", "input": {"command": command}}))
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
print(json.dumps({"type": "end", "result": {"success": True}}))
"""

TOML = f"""
name = "in-a-file"
argv = ["python3", "{{home}}/agent.py", "{{instruction}}"]
env = {{ KEY = "{{key}}", URL = "{{base_url}}" }}
says_done = true

[files]
"{{home}}/agent.py" = '''{PROGRAM}'''

[wires.chat]

[[lines]]
when = {{ type = "said" }}
kind = "assistant"
text = "part.0.text"

[[lines]]
when = {{ type = "call" }}
kind = "tool_call"
tool = "name"
call_id = "id"
fields = "input"

[[lines]]
when = {{ type = "end" }}
kind = "done"
ok = "result.success"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "in-a-file.toml"
    path.write_text(TOML)
    return path


def test_lines_become_events_by_the_table(file):
    parser = agents.parse(agents.get(str(file)))
    lines = [
        "a banner", {"type": "said", "part": [{"text": "hi"}]}, {"type": "said", "part": []}, {"type": "unknown"},
        {"type": "call", "id": "c1", "name": "shell", "input": {"command": "ls"}}, {"type": "end", "result": {"success": False}},
        {"type": "end", "result": {"success": True}},
    ]  # fmt: skip
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    seen = [(e.kind, e.text, e.tool, e.call_id, e.ok, dict(e.fields)) for e in parser.feed(text.encode())]
    assert seen == [
        ("raw", "a banner", None, None, None, {}),
        ("assistant", "hi", None, None, None, {}),
        ("assistant", "", None, None, None, {}),
        ("tool_call", "", "shell", "c1", None, {"command": "ls"}),
        ("done", "", None, None, False, {}),
        ("done", "", None, None, True, {}),
    ]


@pytest.mark.parametrize(("error", "ok"), [({}, True), ({"error": "x"}, False), ({"error": None}, True)])
def test_a_done_without_an_error_went_well(error, ok):
    line = {"type": "end", **error}
    agent = Agent(name="a", lines=(EventRule(when={"type": "end"}, kind="done", failed="error"),))
    assert [event.ok for event in agents.parse(agent).feed(json.dumps(line).encode() + b"\n")] == [ok]


def test_a_table_and_a_function_are_one_too_many():
    with pytest.raises(ConfigError, match="events and lines both"):
        Agent(name="a", lines=(EventRule(when={}, kind="done"),), events=lambda line, before: ())


@pytest.mark.slow
@pytest.mark.agent
def test_the_suite_runs_on_an_agent_in_a_file(file):
    command = [str(Path(sys.executable).with_name("rollyard")), "check", "agent", str(file), "--json", "--only"]
    for case in ("W1", "W3", "O6"):
        done = subprocess.run([*command, case], capture_output=True, text=True, timeout=280)
        outcomes = json.loads(done.stdout)["outcomes"]
        assert [(one["id"], one["result"]) for one in outcomes] == [(case, "passed")], done.stdout
