"""Exact tokens through the gate, for agents of every dialect: real SDKs that echo history their own way, a trainer that
replies with ids, and one branch that holds exactly those ids."""

import asyncio
import json

import pytest

import rollyard as ry
from rollyard.core.call import ids
from tests.servers.smollm import weights

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
# odd spacing and key order, text with odd white space, reasoning, two calls at once: nothing a re-render would reproduce
TURNS = (
    'I look.  \n\n<tool_call>\n{"name": "bash", "arguments": {"command":   "ls"}}\n</tool_call>',
    '<think>\nhm,  two at once\n</think>\n\n<tool_call>\n{"arguments": {"command": "a"}, "name": "bash"}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": { "command" : "b" }}\n</tool_call>',
    "all done",
)


async def chat_agent(url, key):
    from openai import AsyncOpenAI

    tools = [{"type": "function", "function": {"name": "bash", "description": "runs", "parameters": SCHEMA}}]
    messages = [{"role": "system", "content": "be good"}, {"role": "user", "content": "go"}]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
            message = answer.choices[0].message
            calls = message.tool_calls or []
            if not calls:
                return message.content
            echo = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.function.name, "arguments": tight(c.function.arguments)},
                }
                for c in calls
            ]
            messages.append({"role": "assistant", "content": (message.content or "").rstrip(), "tool_calls": echo})
            messages += [{"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in calls]


async def responses_agent(url, key):
    from openai import AsyncOpenAI

    tools = [{"type": "function", "name": "bash", "description": "runs", "parameters": SCHEMA}]
    items = [{"role": "user", "content": "go"}]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        while True:
            answer = await client.responses.create(
                model="m", instructions="be good", input=items, tools=tools, store=False
            )
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            items += [{"type": "function_call_output", "call_id": c.call_id, "output": "ok"} for c in calls]


async def messages_agent(url, key):
    from anthropic import AsyncAnthropic

    tools = [{"name": "bash", "description": "runs", "input_schema": SCHEMA}]
    messages = [{"role": "user", "content": "go"}]
    async with AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        while True:
            answer = await client.messages.create(
                model="m", system="be good", max_tokens=100, messages=messages, tools=tools
            )
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in answer.content if block.type == "text")
            messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]})
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": "ok"} for c in calls]
            messages.append({"role": "user", "content": results})


async def gemini_agent(url, key):
    from google import genai
    from google.genai import types

    client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url))
    tool = types.Tool(function_declarations=[{"name": "bash", "description": "runs", "parameters": SCHEMA}])
    config = types.GenerateContentConfig(
        system_instruction="be good", tools=[tool], automatic_function_calling={"disable": True}
    )
    contents = [types.Content(role="user", parts=[types.Part(text="go")])]
    while True:
        answer = await client.aio.models.generate_content(model="m", contents=contents, config=config)
        content = answer.candidates[0].content
        calls = [part.function_call for part in content.parts if part.function_call]
        if not calls:
            return "".join(part.text for part in content.parts if part.text)
        kept = [part for part in content.parts if not part.thought]  # as real agents do
        contents.append(types.Content(role="model", parts=kept))
        results = [
            types.Part(function_response=types.FunctionResponse(id=c.id, name=c.name, response={"output": "ok"}))
            for c in calls
        ]
        contents.append(types.Content(role="user", parts=results))


def tight(arguments):
    return json.dumps(json.loads(arguments), separators=(",", ":"))


async def train(queue, renderer):
    """A trainer that owns every token: it answers turn n with the ids of `TURNS[n]`."""
    turn = 0
    while batch := await queue.take():
        for held in batch:
            sampled = renderer.encode(TURNS[turn]) + ids(renderer.stop_ids)
            await held.reply(sampled, [-0.25] * len(sampled), version=turn)
            turn += 1


@pytest.mark.parametrize("agent", [chat_agent, responses_agent, messages_agent, gemini_agent])
async def test_every_prompt_of_every_dialect_begins_with_the_ids_that_were_sampled(agent, tool_model):
    renderer = ry.policy.renderer(tool_model)
    queue = ry.policy.Queue(renderer=renderer)
    async with ry.Gate(queue, host="127.0.0.1") as gate:
        session = await gate.open_session("r1", held=True)
        trainer = asyncio.create_task(train(queue, renderer))
        async with asyncio.timeout(60):
            assert await agent(gate.url, session.key) == "all done"
        counts = dict(queue.prompts.counts)
        trajectory = await session.close()
    await queue.aclose()
    await trainer
    assert counts == {"render:new_root": 1, "bridge": 2}
    (branch,) = trajectory.branches
    sampled = [renderer.encode(text) + ids(renderer.stop_ids) for text in TURNS]
    assert [node.ids for node in branch.nodes if node.sampled] == sampled
    assert sum(branch.mask) == sum(len(s) for s in sampled)
    trained = [version for version, on in zip(branch.versions, branch.mask, strict=True) if on]
    assert trained == [n for n, s in enumerate(sampled) for _ in s]
    text = renderer.decode(branch.ids)
    assert text.count("<tool_response>\nok\n</tool_response>") == 3 and text.count("be good") == 1


@pytest.mark.parametrize("agent", [chat_agent, responses_agent, messages_agent, gemini_agent])
async def test_a_real_model_answers_agents_of_every_dialect_with_recorded_tokens(agent, smollm_url):
    """SmolLM2 behind the token policy, asked by real SDKs: every call is captured at the level of tokens."""
    policy = ry.policy.tokens(
        smollm_url,
        renderer=ry.policy.renderer(weights(), tools="omit"),
        max_tokens_cap=8,
        sampling={"temperature": 0.0},
    )
    async with ry.Gate(policy, host="127.0.0.1") as gate:
        session = await gate.open_session("r1")
        async with asyncio.timeout(60):
            assert isinstance(await agent(gate.url, session.key), str)
        trajectory = await session.close()
    await policy.aclose()
    (record,) = trajectory.records
    assert record.capture == "tokens" and record.prompt_source == "render" and record.effective.max_tokens == 8
    (branch,) = trajectory.branches
    assert 0 < sum(branch.mask) <= 8 and not branch.flaws


async def test_a_chat_upstream_answers_the_openai_client_through_the_gate(smollm_url):
    """K2 and R1 with a real client, a real gate and a real server: ids, logprobs and latency are recorded."""
    policy = ry.policy.upstream(smollm_url + "/v1", max_tokens_cap=6)
    async with ry.Gate(policy, host="127.0.0.1") as gate:
        session = await gate.open_session("r1")
        assert isinstance(await chat_agent(gate.url, session.key), str)
        trajectory = await session.close()
    await policy.aclose()
    (record,) = trajectory.records
    answer = trajectory.answer(record.id)
    assert len(answer.ids) == len(answer.logprobs) == record.usage.completion_tokens <= 6
    assert record.finished_at > record.started_at and record.effective.max_tokens == 6


async def test_a_new_gate_with_a_new_policy_goes_on_from_the_recorded_ids(tmp_path):
    """The process died between two turns: the store gives the ids back, and the next prompt begins with them."""
    from openai import AsyncOpenAI

    tools = [{"type": "function", "function": {"name": "bash", "description": "runs", "parameters": SCHEMA}}]
    messages = [{"role": "user", "content": "go"}]
    key, sources = None, []
    for _ in range(2):
        policy = ry.policy.scripted([{"shell": "ls"}, {"text": "done"}])
        async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(policy, log=store, host="127.0.0.1") as gate:
            key = key or (await gate.open_session("r1")).key
            async with AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=key, max_retries=0) as client:
                answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
            said = answer.choices[0].message
            if said.tool_calls:
                echo = {
                    "id": said.tool_calls[0].id,
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command":"ls"}'},
                }
                messages += [
                    {"role": "assistant", "content": None, "tool_calls": [echo]},
                    {"role": "tool", "tool_call_id": echo["id"], "content": "ok"},
                ]
            records = gate.sessions["r1"].trajectory.records
            sources.append(records[-1].prompt_source)
    assert sources == ["render", "bridge"] and said.content == "done"
