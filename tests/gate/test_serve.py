"""`rollyard serve gate`: from options to a ready line, a served call, and a clean stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.gate.conftest import Answer, chat, request

pytestmark = pytest.mark.anyio
ROLLYARD = str(Path(sys.executable).with_name("rollyard"))


async def start(tmp_path, *options):
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    command = [ROLLYARD, "serve", "gate", "--json", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=env)
    return process, json.loads(await asyncio.wait_for(process.stdout.readline(), 60))


async def ask(ready, method, path, key, body=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(ready["url"].rpartition(":")[2]))
    writer.write(request(method, path, key=key, body=body))
    try:
        return Answer(await asyncio.wait_for(reader.read(), 30))
    finally:
        writer.close()


async def refused(*options) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        ROLLYARD, "serve", "gate", *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, err.decode()


async def test_calls_are_held_for_the_trainer_over_http(tmp_path):
    process, ready = await start(tmp_path, "--mode", "interception_gate", "--store", str(tmp_path / "runs.db"))
    admin, trainer = (Path(ready[f"{role}_key_file"]) for role in ("admin", "trainer"))
    assert {p.stat().st_mode & 0o777 for p in (admin, trainer)} == {0o600}
    operator, owner = admin.read_text().strip(), trainer.read_text().strip()
    opened = (await ask(ready, "POST", "/sessions", operator, {"session_id": "r1"})).json
    asked = asyncio.ensure_future(ask(ready, "POST", "/v1/chat/completions", opened["api_key"], chat("what?")))
    (held,) = (await ask(ready, "GET", "/calls?wait=10", owner)).json["calls"]
    await ask(ready, "POST", f"/calls/{held['call_id']}/reply", owner, {"text": "that"})
    assert (await asked).json["choices"][0]["message"]["content"] == "that"
    document = (await ask(ready, "GET", "/sessions/r1/rollout", operator)).json
    assert document["stats"]["n_turns"] == 1
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 20) == 0
    assert not admin.exists() and not trainer.exists(), "keys nobody named go with the server"


async def test_a_gate_loads_no_library_that_it_does_not_use(tmp_path):
    process, _ = await start(tmp_path, "--upstream", "http://127.0.0.1:1/v1", "--store", str(tmp_path / "runs.db"))
    loaded = Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.wait(), 20)
    assert "uvloop" in loaded
    assert "pydantic_core" not in loaded  # 8 MB of its memory, which a command line may bring along


@pytest.mark.parametrize(
    ("answers", "unused"),
    [
        (("--policy", "scripted:steps.yaml"), ("--key-env", "KEY")),
        (("--policy", "scripted:steps.yaml"), ("--model", "m")),
        (("--mode", "interception_gate"), ("--upstream", "http://127.0.0.1:1/v1")),
        (("--mode", "black_box", "--upstream", "http://127.0.0.1:1/v1"), ("--model", "m")),
    ],
)
async def test_what_is_meant_for_a_model_server_is_refused_where_none_is_asked(answers, unused):
    code, words = await refused(*answers, *unused)
    assert code == 2 and f"{unused[0]} has no effect with {' '.join(answers[:2]).partition(':')[0]}" in words


async def test_options_that_make_no_sense_are_usage_errors(tmp_path):
    code, words = await refused("--mode", "white_box", "--upstream", "http://127.0.0.1:1/v1")
    assert code == 2 and "black_box, transparent_proxy, interception_gate" in words
    assert (await refused())[0] == 2
    loose = tmp_path / "key"
    loose.write_text("k" * 30)
    loose.chmod(0o644)
    code, words = await refused("--upstream", "http://127.0.0.1:1/v1", "--admin-key-file", str(loose))
    assert code == 2 and "chmod 600" in words
