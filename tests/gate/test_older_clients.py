"""An SDK of an earlier generation, in a venv of its own: agents pin what they pin."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.gate.conftest import Answers, open_gate
from tests.gate.test_clients import reply
from tests.plane.venvs import venv_or_skip

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


async def test_openai_2_is_served_like_the_newest():
    python = await asyncio.to_thread(venv_or_skip, "openai", ["openai>=2,<3"])
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
