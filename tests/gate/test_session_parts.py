"""A session with a policy, tools or a secret of its own, after SIGKILL: it gets them back, or says by name what it lacks."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from rollyard import policy
from rollyard.core.errors import ConfigError
from rollyard.store import Store
from rollyard.tools import Toolset
from tests.gate import killed_gate
from tests.gate.conftest import open_gate, request, send
from tests.gate.killed_gate import press, press_twice

pytestmark = pytest.mark.anyio
ADMIN = "admin-" + "0123456789abcdef"


@pytest.fixture
async def killed(tmp_path):
    """The keys of the sessions that a killed program left in the store."""
    (tmp_path / "script.json").write_text(json.dumps({"steps": [{"text": "by its own script"}]}))
    program = await asyncio.create_subprocess_exec(
        sys.executable, killed_gate.__file__, str(tmp_path / "calls.db"), str(tmp_path / "script.json"),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    keys = json.loads(await asyncio.wait_for(program.stdout.readline(), 60))
    program.send_signal(signal.SIGKILL)
    await program.wait()
    return keys


@asynccontextmanager
async def restarted(place, **options):
    async with (
        Store.open(place / "calls.db") as log,
        open_gate(policy.scripted(lambda call: f"key {call.options.get('api_key')}"), log=log, **options) as gate,
    ):
        yield gate


async def say(gate, key: str):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    return await send(gate, request("POST", "/v1/chat/completions", key=key, body=body))


def content(answer) -> str:
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"]


async def test_what_a_killed_gates_sessions_had_of_their_own_comes_back_or_is_asked_for_by_name(
    killed, tmp_path, caplog
):
    async with restarted(tmp_path, reopen=policy.parse) as gate:
        assert content(await say(gate, killed["plain"])) == "key None"
        assert content(await say(gate, killed["text"])) == "by its own script", "never another session's policy"
        for name, lacks in (("python", "policy"), ("tools", "tools"), ("secret", "api_key")):
            refused = await say(gate, killed[name])
            assert refused.status == 503
            assert f"lacks its {lacks}" in refused.body.decode()
        assert "rollyard.policy.scripted_policy.Scripted" in gate.sessions["python"].missing["policy"]
        assert "press" in gate.sessions["tools"].missing["tools"]
        assert "sk-own" not in repr([one.settings for one in gate.sessions.values()])
        assert "supply policy=" in caplog.text
        listing = await send(gate, request("GET", "/mcp", key=killed["tools"]))
        assert listing.status == 503

        gate.supply("python", policy=policy.scripted(lambda call: "own code again"))
        gate.supply("tools", tools=Toolset([press]))
        gate.supply("secret", api_key="sk-own")
        assert content(await say(gate, killed["python"])) == "own code again"
        assert content(await say(gate, killed["tools"])) == "key None"
        assert content(await say(gate, killed["secret"])) == "key sk-own"


async def test_only_what_is_missing_can_be_supplied_and_tools_must_be_the_same(killed, tmp_path):
    async with restarted(tmp_path, admin_key=ADMIN) as gate:
        assert "scripted:" in gate.sessions["text"].missing["policy"], "this gate was not told how to open policies"
        with pytest.raises(ConfigError, match="before the restart: press"):
            gate.supply("tools", tools=Toolset([press_twice]))
        with pytest.raises(ConfigError, match="plain lacks no policy"):
            gate.supply("plain", policy=policy.scripted(["x"]))
        path = "/sessions/secret"
        shown = await send(gate, request("GET", path, key=ADMIN))
        assert list(shown.json["missing"]) == ["api_key"]
        patched = await send(gate, request("PATCH", path, key=ADMIN, body={"api_key": "sk-new"}))
        assert (patched.status, patched.json["missing"]) == (200, {})
        nobody = await send(gate, request("PATCH", "/sessions/nobody", key=ADMIN, body={"api_key": "sk-new"}))
        assert nobody.status == 404
        assert (await send(gate, request("PATCH", path, key=ADMIN, body={"api_key": "sk-new"}))).status == 409
        assert content(await say(gate, killed["secret"])) == "key sk-new"


def test_a_policy_knows_the_text_that_makes_it_again_and_no_text_holds_a_key(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_KEY", "sk-own")
    made = policy.parse("upstream:http://localhost:1/v1#max_tokens_cap=7", model="m", key_env="OWN_KEY")
    again = policy.parse(made.text)
    assert again.settings == made.settings
    assert again.text == made.text
    assert "sk-own" not in made.text
    assert policy.parse("upstream:http://localhost:1/v1", key="sk-own").text is None
    assert policy.upstream("http://localhost:1/v1").text is None
