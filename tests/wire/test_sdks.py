"""The real SDKs against the codecs: what they send is understood, what they are told they accept, whole and streamed.

The transport is in process: an SDK's request goes through `route`, `decode`, and back through `encode` or `stream`.
"""

import base64
import json

import anthropic
import httpx2
import openai
import pytest
from google import genai
from google.genai import types

from rollyard.core.call import Reply, TokenText, Usage
from rollyard.core.message import Image, Message, Text, Thinking, ToolCall
from rollyard.wire import CODECS, route
from rollyard.wire.codec import WireRequest

USAGE = Usage(prompt_tokens=30, completion_tokens=12, cached_tokens=10, reasoning_tokens=4)
SIGNATURE = base64.b64encode(b"signature").decode()
LONG = "word " * 5000  # more than one delta
FULL = Reply(
    message=Message(
        "assistant",
        (
            Thinking("I think.", SIGNATURE),
            Text(LONG),
            ToolCall("call_a", "shell", '{"command": "ls", "n": [1, 2]}'),
            ToolCall("call_b", "shell", '{"command": "pwd"}'),
        ),
    ),
    finish="tool_calls",
    usage=USAGE,
)
PLAIN = Reply(message=Message("assistant", (Text("hello"),)), usage=USAGE)
CUT = Reply(message=Message("assistant", (Text("hel"),)), finish="length", usage=USAGE)
REFUSED = Reply(message=Message("assistant", (Text("I will not."),)), finish="refusal", usage=USAGE)

PIXEL = base64.b64encode(b"\x89PNG").decode()
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


class Served:
    """Answers every request with one reply, and keeps the calls it decoded. `status` makes it fail instead."""

    def __init__(self, reply, status=200, keepalives=0, in_stream_error=False):
        self.reply, self.status, self.keepalives, self.in_stream_error = reply, status, keepalives, in_stream_error
        self.calls = []

    def __call__(self, request):
        found = route(
            request.method,
            request.url.path,
            dict(request.url.params),
            anthropic="anthropic-version" in request.headers,
            google="x-goog-api-key" in request.headers,
        )
        assert found is not None, request.url
        codec = CODECS[found.dialect]
        if self.status != 200:
            return httpx2.Response(self.status, content=codec.error(self.status, "a_code", "a message"))
        if found.endpoint == "models":
            content = codec.model(found.model) if found.model else codec.models(["m", "org/n"])
            return httpx2.Response(200, content=content)
        call = codec.decode(
            WireRequest(
                call_id="call_1",
                rollout_id="rol_1",
                body=request.read(),
                headers={},
                model=found.model,
                stream=found.stream,
                framing=found.framing,
                received_at=1_700_000_000.0,
            )
        )
        self.calls.append(call)
        if found.endpoint == "count_tokens":
            return httpx2.Response(200, content=codec.count_tokens(42))
        if not call.stream:
            return httpx2.Response(
                200, headers={"content-type": "application/json"}, content=codec.encode(call, self.reply)
            )
        if self.in_stream_error:
            content = codec.opening(call) + codec.stream_error(call, 503, "overloaded", "a message")
        else:
            opening = codec.opening(call) if self.keepalives else b""
            frames = codec.stream(call, self.reply, opened=bool(self.keepalives))
            content = opening + codec.keepalive(call) * self.keepalives + b"".join(frames)
        return httpx2.Response(200, headers={"content-type": codec.stream_type(call)}, content=content)

    @property
    def client(self):
        return httpx2.Client(transport=httpx2.MockTransport(self))


def openai_client(served):
    return openai.OpenAI(api_key="k", base_url="http://gate/v1", http_client=served.client, max_retries=0)


def anthropic_client(served):
    return anthropic.Anthropic(api_key="k", base_url="http://gate", http_client=served.client, max_retries=0)


def genai_client(served):
    options = types.HttpOptions(base_url="http://gate", httpx_client=served.client)
    return genai.Client(api_key="k", http_options=options)


CHAT_TOOLS = [{"type": "function", "function": {"name": "shell", "description": "runs", "parameters": PARAMETERS}}]
CHAT_HISTORY = [
    {"role": "developer", "content": "be kind"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        ],
    },
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "shell", "arguments": '{"command":"x"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "done"},
]


class TestChat:
    def ask(self, served, **more):
        return openai_client(served).chat.completions.create(model="m", messages=CHAT_HISTORY, tools=CHAT_TOOLS, **more)

    def test_a_whole_answer(self):
        served = Served(FULL)
        answer = self.ask(served, max_completion_tokens=9, temperature=0)
        message = answer.choices[0].message
        assert message.content == LONG and message.reasoning_content == "I think."
        assert [(c.id, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
            ("call_a", "shell", {"command": "ls", "n": [1, 2]}),
            ("call_b", "shell", {"command": "pwd"}),
        ]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.usage.prompt_tokens_details.cached_tokens == 10
        call = served.calls[0]
        assert [m.role for m in call.messages] == ["system", "user", "assistant", "tool"]
        assert call.messages[1].parts == (Text("look"), Image("image/png", PIXEL))
        assert call.sampling.max_tokens == 9 and call.tools[0].name == "shell"

    def test_a_stream_with_usage_and_keepalives(self):
        chunks = list(self.ask(Served(FULL, keepalives=2), stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == LONG
        assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 42
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"

    def test_a_stream_has_no_usage_unless_asked(self):
        chunks = list(self.ask(Served(PLAIN), stream=True))
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)

    def test_the_sdk_puts_the_stream_together(self):
        client = openai_client(Served(FULL))
        with client.chat.completions.stream(model="m", messages=CHAT_HISTORY, tools=CHAT_TOOLS) as stream:
            final = stream.get_final_completion()
        message = final.choices[0].message
        assert message.content == LONG
        assert [(c.id, c.function.arguments) for c in message.tool_calls] == [
            ("call_a", '{"command": "ls", "n": [1, 2]}'),
            ("call_b", '{"command": "pwd"}'),
        ]

    def test_logprobs_when_asked_and_only_then(self):
        tokens = (TokenText("hel", -0.5, (("hel", -0.5), ("ho", -1.0))), TokenText("lo", -0.25))
        reply = Reply(message=PLAIN.message, tokens=tokens)
        answer = self.ask(Served(reply), logprobs=True, top_logprobs=1)
        content = answer.choices[0].logprobs.content
        assert [(t.token, t.logprob, len(t.top_logprobs)) for t in content] == [("hel", -0.5, 1), ("lo", -0.25, 0)]
        chunks = list(self.ask(Served(reply), logprobs=True, stream=True))
        assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == 2
        assert self.ask(Served(reply)).choices[0].logprobs is None

    def test_length_and_refusal(self):
        assert self.ask(Served(CUT)).choices[0].finish_reason == "length"
        refused = self.ask(Served(REFUSED)).choices[0]
        assert refused.message.refusal == "I will not." and refused.finish_reason == "content_filter"

    def test_errors(self):
        with pytest.raises(openai.AuthenticationError) as caught:
            self.ask(Served(PLAIN, status=401))
        assert caught.value.code == "a_code"
        with pytest.raises(openai.APIError):
            list(self.ask(Served(PLAIN, in_stream_error=True), stream=True))

    def test_models(self):
        client = openai_client(Served(PLAIN))
        assert [m.id for m in client.models.list()] == ["m", "org/n"]
        assert client.models.retrieve("m").id == "m"

    def test_legacy_completions(self):
        client = openai_client(Served(PLAIN))
        assert client.completions.create(model="m", prompt="say").choices[0].text == "hello"
        chunks = list(client.completions.create(model="m", prompt=[1, 2], stream=True))
        assert "".join(c.choices[0].text for c in chunks) == "hello" and chunks[-1].choices[0].finish_reason == "stop"


RESPONSES_TOOLS = [
    {"type": "function", "name": "shell", "parameters": PARAMETERS, "strict": False},
    {"type": "namespace", "name": "mcp__t", "description": "", "tools": [{"type": "function", "name": "magic"}]},
    {"type": "custom", "name": "patch"},
]
SPECIAL = Reply(
    message=Message(
        "assistant",
        (ToolCall("call_a", "magic", "{}", "mcp__t"), ToolCall("call_b", "patch", '{"input":"*** Begin"}')),
    ),
    finish="tool_calls",
    usage=USAGE,
)


class TestResponses:
    def ask(self, served, **more):
        history = [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}]},
            {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ]
        return openai_client(served).responses.create(
            model="m", input=history, tools=RESPONSES_TOOLS, store=False, **more
        )

    def test_a_whole_answer(self):
        served = Served(FULL)
        answer = self.ask(served)
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
        assert answer.output_text == LONG and answer.output[0].summary[0].text == "I think."
        assert answer.output[2].call_id == "call_a" and answer.status == "completed"
        assert (answer.usage.input_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (30, 4)
        assert [m.role for m in served.calls[0].messages] == ["system", "user", "assistant", "tool"]

    def test_the_events_of_a_stream_in_order(self):
        events = list(self.ask(Served(FULL), stream=True))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[2:8] == [
            "response.output_item.added",
            "response.reasoning_summary_part.added",
            "response.reasoning_summary_text.delta",
            "response.reasoning_summary_text.done",
            "response.reasoning_summary_part.done",
            "response.output_item.done",
        ]
        text = kinds[8 : kinds.index("response.output_item.done", 8) + 1]
        assert text[:2] == ["response.output_item.added", "response.content_part.added"]
        assert set(text[2:-3]) == {"response.output_text.delta"}
        assert text[-3:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert kinds[-5:] == [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))

    @pytest.mark.parametrize("keepalives", [0, 3])
    def test_the_sdk_puts_the_stream_together(self, keepalives):
        client = openai_client(Served(FULL, keepalives=keepalives))
        with client.responses.stream(model="m", input="go") as stream:
            final = stream.get_final_response()
        assert final.output_text == LONG and final.output[3].arguments == '{"command": "pwd"}'
        assert final.usage.total_tokens == 42

    def test_namespaced_and_free_text_calls(self):
        answer = self.ask(Served(SPECIAL))
        assert (answer.output[0].namespace, answer.output[0].name) == ("mcp__t", "magic")
        assert (answer.output[1].type, answer.output[1].input) == ("custom_tool_call", "*** Begin")
        kinds = [event.type for event in self.ask(Served(SPECIAL), stream=True)]
        assert "response.custom_tool_call_input.done" in kinds

    def test_a_flat_name_from_the_model_goes_back_into_its_namespace(self):
        flat = Reply(message=Message("assistant", (ToolCall("call_a", "mcp__t__magic", "{}"),)), finish="tool_calls")
        item = self.ask(Served(flat)).output[0]
        assert (item.namespace, item.name) == ("mcp__t", "magic")

    def test_a_cut_answer_is_incomplete(self):
        answer = self.ask(Served(CUT))
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        last = list(self.ask(Served(CUT), stream=True))[-1]
        assert (last.type, last.response.status) == ("response.completed", "incomplete")

    def test_errors(self):
        with pytest.raises(openai.BadRequestError):
            self.ask(Served(PLAIN, status=400))
        last = list(self.ask(Served(PLAIN, in_stream_error=True), stream=True))[-1]
        assert (last.type, last.response.error.message) == ("response.failed", "a message")

    def test_counting(self):
        assert openai_client(Served(PLAIN)).responses.input_tokens.count(model="m", input="x").input_tokens == 42


MESSAGES_TOOLS = [{"name": "shell", "description": "runs", "input_schema": PARAMETERS}]
MESSAGES_HISTORY = [
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "tool_use", "id": "c", "name": "shell", "input": {"command": "x"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "bad"}], "is_error": True},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
        ],
    },
]


class TestMessages:
    def ask(self, served, **more):
        return anthropic_client(served).messages.create(
            model="m", max_tokens=99, system="be kind", messages=MESSAGES_HISTORY, tools=MESSAGES_TOOLS, **more
        )

    def test_a_whole_answer(self):
        served = Served(FULL)
        answer = self.ask(served, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (answer.content[0].thinking, answer.content[0].signature) == ("I think.", SIGNATURE)
        assert answer.content[2].input == {"command": "ls", "n": [1, 2]}
        assert (answer.stop_reason, answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (
            "tool_use",
            20,
            10,
        )
        call = served.calls[0]
        assert [m.role for m in call.messages] == ["system", "user", "assistant", "tool", "user"]
        assert call.messages[3].tool_results[0].is_error and call.messages[4].parts == (Image("image/png", PIXEL),)

    def test_the_events_of_a_stream_in_order(self):
        kinds = [event.type for event in self.ask(Served(PLAIN, keepalives=2), stream=True)]
        assert kinds == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]

    def test_the_sdk_puts_the_stream_together(self):
        client = anthropic_client(Served(FULL, keepalives=1))
        with client.messages.stream(model="m", max_tokens=9, messages=MESSAGES_HISTORY) as stream:
            final = stream.get_final_message()
        assert final.content[0].signature == SIGNATURE and final.content[1].text == LONG
        assert final.content[3].input == {"command": "pwd"}
        assert (final.stop_reason, final.usage.output_tokens, final.usage.input_tokens) == ("tool_use", 12, 20)

    def test_length_and_refusal(self):
        assert self.ask(Served(CUT)).stop_reason == "max_tokens"
        assert self.ask(Served(REFUSED)).stop_reason == "refusal"

    def test_errors(self):
        with pytest.raises(anthropic.NotFoundError):
            self.ask(Served(PLAIN, status=404))
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(self.ask(Served(PLAIN, in_stream_error=True), stream=True))
        assert caught.value.body["error"]["type"] == "overloaded_error"

    def test_counting_and_models(self):
        client = anthropic_client(Served(PLAIN))
        assert client.messages.count_tokens(model="m", messages=MESSAGES_HISTORY).input_tokens == 42
        assert [m.id for m in client.models.list()] == ["m", "org/n"]
        assert client.models.retrieve("m").id == "m"


GEMINI_TOOLS = [types.Tool(function_declarations=[types.FunctionDeclaration(name="shell", parameters=PARAMETERS)])]


class TestGemini:
    def ask(self, served, stream=False, **config):
        models = genai_client(served).models
        contents = [
            types.Content(
                role="user",
                parts=[types.Part(text="go"), types.Part.from_bytes(data=b"\x89PNG", mime_type="image/png")],
            ),
            types.Content(
                role="model",
                parts=[types.Part(function_call=types.FunctionCall(id="c", name="shell", args={"command": "x"}))],
            ),
            types.Content(
                role="user",
                parts=[
                    types.Part(
                        function_response=types.FunctionResponse(id="c", name="shell", response={"output": "done"})
                    )
                ],
            ),
        ]
        wanted = types.GenerateContentConfig(
            system_instruction="be kind",
            tools=GEMINI_TOOLS,
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
            **config,
        )
        ask = models.generate_content_stream if stream else models.generate_content
        return ask(model="m", contents=contents, config=wanted)

    def test_a_whole_answer(self):
        served = Served(FULL)
        answer = self.ask(
            served, temperature=0.5, top_k=64, max_output_tokens=7, thinking_config={"thinking_budget": 8192}
        )
        parts = answer.candidates[0].content.parts
        assert parts[0].thought and parts[0].text == "I think." and parts[0].thought_signature == b"signature"
        assert answer.text == LONG
        assert [(c.id, c.name, c.args) for c in answer.function_calls] == [
            ("call_a", "shell", {"command": "ls", "n": [1, 2]}),
            ("call_b", "shell", {"command": "pwd"}),
        ]
        usage = answer.usage_metadata
        assert (usage.prompt_token_count, usage.candidates_token_count, usage.thoughts_token_count) == (30, 8, 4)
        call = served.calls[0]
        assert [m.role for m in call.messages] == ["system", "user", "assistant", "tool"]
        assert call.messages[1].parts[1] == Image("image/png", PIXEL)
        assert json.loads(call.tools[0].schema) == PARAMETERS
        assert (call.sampling.temperature, call.sampling.top_k, call.sampling.max_tokens) == (0.5, 64, 7)

    @pytest.mark.parametrize("keepalives", [0, 2])
    def test_a_stream(self, keepalives):
        chunks = list(self.ask(Served(FULL, keepalives=keepalives), stream=True))
        assert "".join(chunk.text or "" for chunk in chunks) == LONG
        assert [c.id for chunk in chunks for c in chunk.function_calls or ()] == ["call_a", "call_b"]
        assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
        assert chunks[-1].usage_metadata.total_token_count == 42

    def test_length_and_refusal(self):
        assert self.ask(Served(CUT)).candidates[0].finish_reason == types.FinishReason.MAX_TOKENS
        assert self.ask(Served(REFUSED)).candidates[0].finish_reason == types.FinishReason.SAFETY

    def test_errors(self):
        with pytest.raises(genai.errors.ServerError) as caught:
            self.ask(Served(PLAIN, status=503))
        assert caught.value.status == "UNAVAILABLE"
        with pytest.raises(genai.errors.APIError):
            list(self.ask(Served(PLAIN, in_stream_error=True), stream=True))

    def test_counting_and_models(self):
        client = genai_client(Served(PLAIN))
        assert client.models.count_tokens(model="m", contents="x").total_tokens == 42
        assert [m.name for m in client.models.list()] == ["models/m", "models/org/n"]
        assert client.models.get(model="m").name == "models/m"
