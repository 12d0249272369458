"""An SDK of an earlier generation, in a venv of its own: agents pin what they pin."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gate.conftest import Answers, open_gate
from tests.gate.test_clients import reply

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
WORK = """
import json, sys, openai
url, key = sys.argv[1:]
client = openai.OpenAI(base_url=url + "/v1", api_key=key)
user = [{"role": "user", "content": "hi"}]
tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
whole = client.chat.completions.create(model="m", messages=user)
parts = [c.choices[0].delta.content or "" for c in client.chat.completions.create(model="m", messages=user, stream=True)]
called = client.chat.completions.create(model="m", messages=user, tools=tools)
events = [e.type for e in client.responses.create(model="m", input="hi", stream=True)]
print(json.dumps({
    "version": openai.__version__,
    "whole": whole.choices[0].message.content,
    "streamed": "".join(parts),
    "called": called.choices[0].message.tool_calls[0].function.arguments,
    "events": [events[0], events[-1]],
}))
"""


def interpreter(name: str, *requirements: str) -> str:
    """A venv under $ROLLYARD_CACHE, made on first use."""
    cache = Path(os.environ.get("ROLLYARD_CACHE") or Path.home() / ".cache" / "rollyard")
    place = cache / "venvs" / name
    if not (place / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements], check=True)
        (place / ".ready").touch()
    return str(place / "bin" / "python")


async def test_openai_2_is_served_like_the_newest():
    try:
        python = await asyncio.to_thread(interpreter, "openai-2", "openai>=2,<3")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"openai 2.x cannot be installed here: pip exited with {error.returncode}")
    async with open_gate(Answers(reply)) as gate:
        session = await gate.open_session("r1")
        program = await asyncio.create_subprocess_exec(
            python, "-c", WORK, gate.url, session.key, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(program.communicate(), 120)
    assert program.returncode == 0
    seen = json.loads(out)
    assert seen.pop("version").startswith("2.")
    assert seen == {
        "whole": "hello",
        "streamed": "hello",
        "called": '{"city":"Oslo"}',
        "events": ["response.created", "response.completed"],
    }
