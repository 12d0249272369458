"""The tool runners of Anthropic's SDKs, which send only what is new and leave the rest of the conversation to the server.

Whatever they try, the policy is asked with the whole conversation, or not at all.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess

import anthropic
import pytest
from anthropic import beta_tool

from rollyard.core.cache import cache_home, make_once
from rollyard.core.call import Reply
from rollyard.core.message import Message, Text, ToolCall
from tests.gate.conftest import Answers, open_gate

pytestmark = pytest.mark.anyio
SDK = "@anthropic-ai/sdk@1.8.0"
TURNS = 4
RUNNER = """
import Anthropic from '@anthropic-ai/sdk';
const client = new Anthropic({ baseURL: process.argv[2], apiKey: process.argv[3], maxRetries: 0 });
const weather = {
  type: 'custom', name: 'weather', description: 'says the weather',
  input_schema: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
  parse: (input) => input, run: ({ city }) => `sun in ${city}`,
};
const messages = [{ role: 'user', content: 'hi' }];
const last = await client.beta.messages.toolRunner({ model: 'm', max_tokens: 99, messages, tools: [weather] });
console.log(last.content[0].text);
"""


def answer(call) -> Reply:
    """Asks for the weather of one city after the other."""
    seen = sum(message.role == "tool" for message in call.messages)
    if seen == TURNS:
        return Reply(message=Message("assistant", (Text("all seen"),)))
    wanted = ToolCall(f"t{seen}", call.tools[0].name, json.dumps({"city": f"c{seen}"}))
    return Reply(message=Message("assistant", (wanted,)), finish="tool_calls")


@beta_tool
def weather(city: str) -> str:
    """Says the weather.

    Args:
        city: where
    """
    return f"sun in {city}"


def run_python(url: str, key: str) -> str:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="m", max_tokens=99, tools=[weather], messages=[{"role": "user", "content": "hi"}]
    )
    return runner.until_done().content[0].text


def run_javascript(url: str, key: str) -> str:
    def install(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.mjs").write_text(RUNNER)
        subprocess.run(["npm", "install", "--silent", "--prefix", folder, SDK], check=True, timeout=300)

    folder = make_once(cache_home() / "node" / SDK.replace("/", "+"), install)
    (folder / "run.mjs").write_text(RUNNER)
    done = subprocess.run(
        ["node", folder / "run.mjs", url, key], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


node = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@pytest.mark.parametrize("run", [run_python, pytest.param(run_javascript, marks=[node, pytest.mark.slow])])
async def test_a_tool_runner_that_continues_a_thread_is_asked_for_the_whole_conversation(run):
    policy = Answers(answer)
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        assert await asyncio.to_thread(run, gate.url, session.key) == "all seen"
        records = session.trajectory.records
    assert [sum(m.role == "tool" for m in call.messages) for call in policy.asked] == [*range(TURNS + 1)]
    assert all(call.messages[0].text == "hi" and call.tools for call in policy.asked)
    assert [record.edge for record in records] == ["root"] + ["extends"] * TURNS
    assert len(session.trajectory.branches) == 1


async def test_a_thread_is_refused_with_the_code_on_which_clients_send_everything():
    async with open_gate(Answers()) as gate:
        session = await gate.open_session("r1")
        async with anthropic.AsyncAnthropic(base_url=gate.url, api_key=session.key, max_retries=0) as client:
            ask = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
            begun = await client.beta.messages.create(**ask, thread={"type": "create"})
            with pytest.raises(anthropic.NotFoundError) as refused:
                await client.beta.messages.create(**ask, thread={"type": "continue", "previous_message_id": begun.id})
            assert refused.value.body["error"]["details"] == {"error_code": "thread_not_found"}
            with pytest.raises(anthropic.BadRequestError, match="unknown type 'merge'"):
                await client.beta.messages.create(**ask, thread={"type": "merge"})
