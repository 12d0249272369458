"""The SDKs that agents are built on, against the gate on a real socket: sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors as genai_errors
from google.genai import types as genai_types

from rollyard.core.call import Reply, Usage
from rollyard.core.errors import UpstreamError
from rollyard.core.message import Image, Message, Text, ToolCall
from tests.gate.conftest import Answers, open_gate

pytestmark = pytest.mark.anyio
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 16).decode()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = [{"role": "user", "content": "hi"}]


def reply(call) -> Reply:
    """Text; a tool call where tools are offered and not yet used; how many images it saw."""
    images = sum(isinstance(p, Image) for m in call.messages for p in m.parts)
    usage = Usage(prompt_tokens=11, completion_tokens=3)
    if call.tools and call.messages[-1].role != "tool":
        made = ToolCall("call_1", call.tools[0].name, '{"city":"Oslo"}')
        return Reply(message=Message("assistant", (Text("Let me look."), made)), finish="tool_calls", usage=usage)
    words = f"saw {images} images" if images else "It is sunny." if call.tools else "hello"
    return Reply(message=Message("assistant", (Text(words),)), usage=usage)


@asynccontextmanager
async def place(policy=None):
    async with open_gate(policy or Answers(reply)) as gate:
        yield gate, await gate.open_session("r1")


def in_thread(work):
    return asyncio.to_thread(work)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat(stream):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    async with place() as (gate, session), openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=session.key) as client:
        if stream:
            chunks = [
                c
                async for c in await client.chat.completions.create(
                    model="m", messages=USER, tools=tools, stream=True, stream_options={"include_usage": True}
                )
            ]
            calls = [t for c in chunks for ch in c.choices for t in ch.delta.tool_calls or []]
            assert calls[0].id == "call_1" and calls[0].index == 0 and calls[0].function.name == "weather"
            assert "".join(t.function.arguments or "" for t in calls) == '{"city":"Oslo"}'
            assert chunks[-1].usage.prompt_tokens == 11
            return
        first = await client.chat.completions.create(model="m", messages=USER, tools=tools)
        assert first.choices[0].finish_reason == "tool_calls"
        assert first.usage.completion_tokens == 3
        result = {"role": "tool", "tool_call_id": "call_1", "content": "sun"}
        second = await client.chat.completions.create(
            model="m", messages=[*USER, first.choices[0].message.model_dump(exclude_none=True), result], tools=tools
        )
        assert second.choices[0].message.content == "It is sunny."
        (branch,) = session.trajectory.branches
        assert branch.roles == ("user", "assistant", "tool", "assistant")


async def test_openai_chat_from_a_blocking_client():
    async with place() as (gate, session):

        def work():
            with openai.OpenAI(base_url=f"{gate.url}/v1", api_key=session.key) as client:
                image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
                asked = [{"role": "user", "content": [{"type": "text", "text": "look"}, image]}]
                whole = client.chat.completions.create(model="m", messages=asked)
                parts = [
                    c.choices[0].delta.content or ""
                    for c in client.chat.completions.create(model="m", messages=USER, stream=True)
                ]
                return whole.choices[0].message.content, "".join(parts), [m.id for m in client.models.list()]

        assert await in_thread(work) == ("saw 1 images", "hello", ["policy"])


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_responses(stream):
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    async with place() as (gate, session), openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=session.key) as client:
        if stream:
            events = [e async for e in await client.responses.create(model="m", input="hi", tools=tools, stream=True)]
            kinds = [e.type for e in events]
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            done = events[-1].response
        else:
            done = await client.responses.create(model="m", input="hi", tools=tools)
        called = next(item for item in done.output if item.type == "function_call")
        assert called.call_id == "call_1" and called.arguments == '{"city":"Oslo"}'
        assert done.usage.input_tokens == 11
        after = await client.responses.create(
            model="m",
            tools=tools,
            input=[
                {"role": "user", "content": "hi"},
                *[item.model_dump(exclude_none=True) for item in done.output],
                {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
            ],
        )
        assert after.output_text == "It is sunny."


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages(stream):
    tools = [{"name": "weather", "description": "w", "input_schema": SCHEMA}]
    async with place() as (gate, session), anthropic.AsyncAnthropic(base_url=gate.url, api_key=session.key) as client:
        if stream:
            async with client.messages.stream(model="m", max_tokens=50, messages=USER, tools=tools) as events:
                done = await events.get_final_message()
        else:
            done = await client.messages.create(model="m", max_tokens=50, messages=USER, tools=tools)
        assert done.stop_reason == "tool_use"
        used = next(block for block in done.content if block.type == "tool_use")
        assert used.id == "call_1" and used.input == {"city": "Oslo"}
        assert (done.usage.input_tokens, done.usage.output_tokens) == (11, 3)
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "sun"}
        after = await client.messages.create(
            model="m",
            max_tokens=50,
            tools=tools,
            messages=[*USER, {"role": "assistant", "content": done.content}, {"role": "user", "content": [result]}],
        )
        assert after.content[0].text == "It is sunny."
        counted = await client.messages.count_tokens(model="m", messages=USER)
        assert counted.input_tokens > 0


async def test_anthropic_from_a_blocking_client():
    async with place() as (gate, session):

        def work():
            with anthropic.Anthropic(base_url=gate.url, api_key=session.key) as client:
                source = {"type": "base64", "media_type": "image/png", "data": PNG}
                asked = [
                    {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "look"}]}
                ]
                whole = client.messages.create(model="m", max_tokens=9, messages=asked)
                with client.messages.stream(model="m", max_tokens=9, messages=USER) as events:
                    return whole.content[0].text, "".join(events.text_stream)

        assert await in_thread(work) == ("saw 1 images", "hello")


def gemini(gate, session) -> genai.Client:
    return genai.Client(api_key=session.key, http_options=genai_types.HttpOptions(base_url=gate.url))


@pytest.mark.parametrize("stream", [False, True])
async def test_google_genai(stream):
    declared = genai_types.FunctionDeclaration(name="weather", description="w", parameters_json_schema=SCHEMA)
    config = genai_types.GenerateContentConfig(
        tools=[genai_types.Tool(function_declarations=[declared])],
        automatic_function_calling=genai_types.AutomaticFunctionCallingConfig(disable=True),
    )
    async with place() as (gate, session):
        client = gemini(gate, session).aio
        if stream:
            parts = [
                c async for c in await client.models.generate_content_stream(model="m", contents="hi", config=config)
            ]
            calls = [call for part in parts for call in part.function_calls or []]
            usage = parts[-1].usage_metadata
        else:
            done = await client.models.generate_content(model="m", contents="hi", config=config)
            calls, usage = done.function_calls, done.usage_metadata
        assert calls[0].name == "weather" and calls[0].args == {"city": "Oslo"}
        assert usage.prompt_token_count == 11
        await client.aclose()


async def test_google_genai_from_a_blocking_client():
    async with place() as (gate, session):

        def work():
            client = gemini(gate, session)
            image = genai_types.Part.from_bytes(data=base64.b64decode(PNG), mime_type="image/png")
            whole = client.models.generate_content(model="m", contents=[image, "look"])
            parts = [c.text or "" for c in client.models.generate_content_stream(model="m", contents="hi")]
            return whole.text, "".join(parts)

        assert await in_thread(work) == ("saw 1 images", "hello")


@pytest.mark.parametrize(
    ("status", "theirs"),
    [(400, "BadRequestError"), (404, "NotFoundError"), (429, "RateLimitError"), (500, "InternalServerError")],
)
async def test_errors_are_the_sdks_own(status, theirs):
    def refuse(call):
        raise UpstreamError("no", status=status)

    async with place(Answers(refuse)) as (gate, session):
        async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=session.key, max_retries=0) as client:
            with pytest.raises(getattr(openai, theirs)):
                await client.chat.completions.create(model="m", messages=USER)
            wanted = "InternalServerError" if status == 429 else theirs  # Codex would give up at once on 429
            with pytest.raises(getattr(openai, wanted)):
                await client.responses.create(model="m", input="hi")
        async with anthropic.AsyncAnthropic(base_url=gate.url, api_key=session.key, max_retries=0) as client:
            with pytest.raises(getattr(anthropic, theirs)):
                await client.messages.create(model="m", max_tokens=1, messages=USER)
        client = gemini(gate, session).aio
        with pytest.raises(genai_errors.APIError) as caught:
            await client.models.generate_content(model="m", contents="hi")
        assert caught.value.code == status
        await client.aclose()


async def test_a_wrong_key_is_the_sdks_authentication_error():
    async with place() as (gate, _):
        async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="sk-wrong-key") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=USER)
        async with anthropic.AsyncAnthropic(base_url=gate.url, api_key="sk-wrong-key") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="m", max_tokens=1, messages=USER)


async def test_an_sdk_that_times_out_and_retries_gets_the_first_answer():
    go = asyncio.Event()

    async def slowly(call):
        await go.wait()
        return reply(call)

    policy = Answers(slowly)
    async with place(policy) as (gate, session):
        async with openai.AsyncOpenAI(
            base_url=f"{gate.url}/v1", api_key=session.key, timeout=0.5, max_retries=3
        ) as client:
            asked = asyncio.ensure_future(client.chat.completions.create(model="m", messages=USER))
            while gate.counters.joined == 0:
                await asyncio.sleep(0.01)
            go.set()
            assert (await asked).choices[0].message.content == "hello"
        assert len(policy.asked) == 1
        assert len(session.trajectory.records) == 1


async def test_a_full_context_is_said_in_words_that_agents_know():
    def refuse(call):
        raise UpstreamError(
            "no", status=400, body=b'{"error":{"message":"maximum context length is 4096 at http://10.0.0.1"}}'
        )

    async with place(Answers(refuse)) as (gate, session):
        async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=session.key, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=USER)
        assert caught.value.code == "context_length_exceeded"
        assert "10.0.0.1" not in str(caught.value.body)
