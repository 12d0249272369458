"""Shapes that real agents send and providers answer with, each read as what it means."""

import json

import msgspec
import pytest

from rollyard.core.call import Call, Reply, Sampling, Usage
from rollyard.core.errors import BadRequest
from rollyard.core.message import Image, Message, Opaque, Text, Thinking, ToolCall, ToolResult, ToolSpec
from rollyard.wire import CODECS
from rollyard.wire.codec import WireRequest
from rollyard.wire.toolnames import flat_name, resolve

from .stream_reader import read_stream


def decode(dialect, body, **fields):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return CODECS[dialect].decode(
        WireRequest(call_id="c", rollout_id="r", body=data, headers={"x-session-id": "s"}, **fields)
    )


def history(dialect, *items):
    return decode(
        dialect,
        {{"messages": "messages", "chat": "messages", "responses": "input", "gemini": "contents"}[dialect]: items},
    ).messages


def rebuilt(call, dialect):
    """What an upstream of `dialect` is sent for a call, when nothing can be patched."""
    call = msgspec.structs.replace(call, raw=b"")
    return json.loads(CODECS[dialect].encode_request(call, model="up", sampling=call.sampling, extra={}))


class TestChat:
    def test_content_as_text_or_parts_and_reasoning_under_either_name(self):
        found = history(
            "chat",
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "reasoning": "r"},
            {"role": "assistant", "content": "x", "reasoning_content": "r", "provider_specific_fields": {}},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "out"}], "name": "sh"},
        )
        assert found[0].parts == (Text("a"), Text("b"))
        assert found[1].parts == (Thinking("r"),)
        assert found[2].parts == (Thinking("r"), Text("x"))
        assert found[3].parts == (ToolResult("c", (Text("out"),), name="sh"),)

    def test_parts_of_unknown_kinds_are_carried(self):
        (message,) = history(
            "chat", {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}
        )
        assert message.parts == (Opaque("chat/input_audio", '{"type":"input_audio","input_audio":{"data":"x"}}'),)
        call = decode(
            "chat", {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": "f"}}]}]}
        )
        assert rebuilt(call, "chat")["messages"][0]["content"] == [{"type": "file", "file": {"file_data": "f"}}]

    def test_an_empty_tool_list_is_not_sent_on(self):
        call = decode(
            "chat", {"messages": [], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "stream": True}
        )
        sent = json.loads(
            CODECS["chat"].encode_request(call, model="m", sampling=call.sampling, extra={"logprobs": True})
        )
        assert sent == {"messages": [], "model": "m", "logprobs": True}

    def test_legacy_functions(self):
        call = decode(
            "chat",
            {
                "messages": [
                    {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
                    {"role": "function", "name": "f", "content": "r"},
                ],
                "functions": [{"name": "f", "parameters": {"type": "object"}}],
            },
        )
        assert call.tools == (ToolSpec("f", "", '{"type": "object"}'),)
        assert call.messages[1].tool_results[0].call_id == call.messages[0].tool_calls[0].id

    def test_a_cap_keeps_the_name_the_agent_used(self):
        call = decode("chat", {"messages": [], "max_completion_tokens": 900})
        sent = json.loads(CODECS["chat"].encode_request(call, model="m", sampling=Sampling(max_tokens=5), extra={}))
        assert sent == {"messages": [], "model": "m", "max_completion_tokens": 5}

    def test_several_choices_are_refused(self):
        with pytest.raises(BadRequest, match="n:"):
            decode("chat", {"messages": [], "n": 2})

    def test_headers_and_the_body_stay_with_the_call(self):
        body = b'{"messages": [], "model": "m", "user": "x"}'
        call = decode("chat", body, received_at=3.5)
        assert (call.raw, call.headers, call.received_at, call.model) == (body, {"x-session-id": "s"}, 3.5, "m")


class TestMessages:
    def test_system_messages_inside_the_history_keep_their_place(self):
        found = decode(
            "messages",
            {
                "system": [
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
                ],
                "messages": [
                    {"role": "system", "content": "environment"},
                    {"role": "user", "content": "go"},
                    {"role": "system", "content": [{"type": "text", "text": "reminder"}]},
                ],
            },
        ).messages
        assert [(m.role, m.text) for m in found] == [
            ("system", "ab"),
            ("system", "environment"),
            ("user", "go"),
            ("system", "reminder"),
        ]

    def test_a_chat_server_is_sent_one_system_message_first(self):
        """Templates of common models refuse a second or a late one."""
        body = {
            "system": "a",
            "messages": [
                {"role": "system", "content": "b"},
                {"role": "user", "content": "go"},
                {"role": "system", "content": "late"},
            ],
        }
        sent = rebuilt(decode("messages", body), "chat")["messages"]
        assert [message["role"] for message in sent] == ["system", "user", "user"]
        assert [part["text"] for part in sent[0]["content"]] == ["a", "b"]
        late = {"messages": [{"role": "user", "content": "go"}, {"role": "system", "content": "late"}]}
        assert [message["role"] for message in rebuilt(decode("chat", late), "chat")["messages"]] == ["user", "system"]

    def test_results_come_first_and_the_rest_of_the_turn_after_them(self):
        found = history(
            "messages",
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "before"},
                    {"type": "tool_result", "tool_use_id": "a", "content": "1"},
                    {"type": "tool_result", "tool_use_id": "b"},
                    {"type": "text", "text": "after"},
                ],
            },
        )
        assert found == (
            Message("tool", (ToolResult("a", (Text("1"),)),)),
            Message("tool", (ToolResult("b"),)),
            Message("user", (Text("before"), Text("after"))),
        )

    def test_sealed_thinking_server_tools_and_documents_survive(self):
        document = {"type": "document", "source": {"type": "text", "data": "d"}, "cache_control": {"type": "ephemeral"}}
        server = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": 1}}
        call = decode(
            "messages",
            {
                "messages": [
                    {"role": "user", "content": [document]},
                    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "zzz"}, server]},
                ],
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            },
        )
        assert call.messages[1].parts[0] == Thinking("", "zzz", redacted=True)
        sent = rebuilt(call, "messages")
        del document["cache_control"]
        assert sent["messages"][0]["content"] == [document]
        assert sent["messages"][1]["content"] == [{"type": "redacted_thinking", "data": "zzz"}, server]
        assert sent["tools"] == [{"type": "web_search_20250305", "name": "web_search"}]
        assert "tools" not in rebuilt(call, "chat")

    def test_what_claude_code_asks_for(self):
        call = decode(
            "messages",
            {
                "messages": [],
                "max_tokens": 32000,
                "thinking": {"type": "adaptive"},
                "output_config": {"effort": "high"},
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
                "context_management": {"edits": []},
                "metadata": {"user_id": "{}"},
                "stream": True,
            },
        )
        assert call.sampling.tool_choice == "required" and call.sampling.parallel_tool_calls is False
        assert json.loads(call.sampling.reasoning) == {"enabled": True, "effort": "high"}
        assert call.stream and call.include_usage

    def test_unsigned_thinking_is_not_sent_to_a_provider_that_would_refuse_it(self):
        assistant = Message("assistant", (Thinking("mine"), Text("x"), Thinking("theirs", "sig")))
        call = Call(id="c", rollout_id="r", dialect="chat", model="m", messages=(assistant,))
        kinds = [block["type"] for block in rebuilt(call, "messages")["messages"][0]["content"]]
        assert kinds == ["text", "thinking"]

    def test_arguments_cut_off_in_the_middle_stay_readable_and_come_back(self):
        cut = Reply(message=Message("assistant", (ToolCall("c", "sh", '{"command": "ec'),)), finish="length")
        call = Call(id="c", rollout_id="r", dialect="messages", model="m", messages=())
        for dialect in ("messages", "gemini", "chat", "responses"):
            codec = CODECS[dialect]
            assert codec.decode_reply(codec.encode(call, cut)).message == cut.message
            whole = read_stream(dialect, b"".join(codec.stream(call, cut)))
            assert codec.decode_reply(whole).message == cut.message


class TestResponses:
    def test_the_items_of_one_turn_are_one_message(self):
        found = history(
            "responses",
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}], "content": None},
            {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{ }"},
            {
                "type": "function_call",
                "id": "fc_2",
                "call_id": "c2",
                "name": "magic",
                "namespace": "mcp__t",
                "arguments": "{}",
            },
            {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "1"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_image", "image_url": "http://i"}],
            },
        )
        assert [m.role for m in found] == ["user", "assistant", "tool", "tool"]
        assert found[1].parts == (
            Thinking("t", '{"id":"rs_1"}'),
            Text("a"),
            ToolCall("c1", "f", "{ }"),
            ToolCall("c2", "magic", "{}", "mcp__t"),
        )
        assert found[3].tool_results[0].parts == (Image(url="http://i"),)

    def test_sealed_reasoning_goes_back_to_its_provider_unchanged(self):
        items = [
            {"type": "reasoning", "id": "rs_a", "summary": [], "encrypted_content": "sealed"},
            {"type": "reasoning", "id": "rs_b", "summary": [{"type": "summary_text", "text": t} for t in "xy"]},
            {
                "type": "reasoning",
                "id": "rs_c",
                "summary": [{"type": "summary_text", "text": "s"}],
                "content": [{"type": "reasoning_text", "text": "c"}],
                "encrypted_content": "sealed",
            },
            {"type": "reasoning", "id": "rs_d", "summary": [], "content": [{"type": "reasoning_text", "text": "raw"}]},
        ]
        body = {"status": "completed", "output": items}
        reply = CODECS["responses"].decode_reply(json.dumps(body).encode())
        assert [part.text for part in reply.message.parts] == ["", "x\n\ny", "s", "raw"]
        call = Call(id="c", rollout_id="r", dialect="responses", model="m", messages=())
        assert json.loads(CODECS["responses"].encode(call, reply))["output"] == items
        call = msgspec.structs.replace(call, messages=(reply.message,))
        assert rebuilt(call, "responses")["input"] == items

    def test_instructions_a_bare_prompt_and_items_of_other_tools(self):
        assert [(m.role, m.text) for m in decode("responses", {"instructions": "be", "input": "go"}).messages] == [
            ("system", "be"),
            ("user", "go"),
        ]
        items = [
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "shell_call_output", "call_id": "x", "output": []},
        ]
        call = decode("responses", {"input": items})
        assert [m.role for m in call.messages] == ["assistant", "user"]
        assert rebuilt(call, "responses")["input"] == items

    def test_a_stored_response_cannot_be_continued(self):
        with pytest.raises(BadRequest, match="previous_response_id"):
            decode("responses", {"input": "x", "previous_response_id": "resp_1"})

    def test_a_capped_request_keeps_what_else_was_to_be_included(self):
        call = decode("responses", {"input": "x", "include": ["reasoning.encrypted_content"]})
        wanted = Sampling(logprobs=True, top_logprobs=5)
        sent = json.loads(CODECS["responses"].encode_request(call, model="m", sampling=wanted, extra={}))
        assert sent["include"] == ["reasoning.encrypted_content", "message.output_text.logprobs"]

    def test_namespaces_and_free_text_tools_on_a_chat_server(self):
        call = decode(
            "responses",
            {
                "input": [{"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"}],
                "tools": [
                    {
                        "type": "namespace",
                        "name": "mcp__t",
                        "tools": [{"type": "function", "name": "magic", "parameters": {"type": "object"}}],
                    },
                    {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
                    {"type": "web_search"},
                ],
            },
        )
        sent = rebuilt(call, "chat")
        assert [tool["function"]["name"] for tool in sent["tools"]] == ["mcp__t__magic", "patch"]
        assert sent["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"input":"*** Begin"}'
        function = {"name": "mcp__t__magic", "arguments": "{}"}
        message = {"content": None, "tool_calls": [{"id": "k", "type": "function", "function": function}]}
        answer = json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode()
        reply = CODECS["chat"].decode_reply(answer, call)
        assert reply.message.tool_calls == (ToolCall("k", "magic", "{}", "mcp__t"),)
        (item,) = json.loads(CODECS["responses"].encode(call, reply))["output"]
        echoed = history("responses", item)
        assert echoed == (reply.message,)


class TestGemini:
    def test_signatures_on_any_part(self):
        found = history(
            "gemini",
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True},
                    {"text": "a", "thoughtSignature": "c2ln"},
                    {"functionCall": {"name": "f", "args": {"x": 1}}, "thoughtSignature": "c2ln"},
                    {"text": "", "thoughtSignature": "ZW5k"},
                ],
            },
        )
        assert found[0].parts == (
            Thinking("hm"),
            Text("a"),
            Thinking("", "c2ln"),
            ToolCall("f", "f", '{"x": 1}', None, "c2ln"),
            Thinking("", "ZW5k"),
        )
        call = Call(id="c", rollout_id="r", dialect="gemini", model="m", messages=found)
        sent = rebuilt(call, "gemini")["contents"][0]["parts"]
        assert sent[1] == {"text": "a", "thoughtSignature": "c2ln"} and sent[3] == {
            "text": "",
            "thoughtSignature": "ZW5k",
        }

    def test_a_call_and_its_result_meet_without_ids(self):
        found = history(
            "gemini",
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
            {"role": "function", "parts": [{"functionResponse": {"name": "f", "response": {"a": [1]}}}]},
        )
        assert found[0].tool_calls[0].id == found[1].tool_results[0].call_id
        assert found[1].tool_results[0].parts == (Text('{"a":[1]}'),)

    def test_a_reply_without_call_ids_is_given_some(self):
        parts = [{"functionCall": {"name": "f", "args": {}}}, {"functionCall": {"name": "f", "args": {}}}]
        body = {"candidates": [{"content": {"parts": parts}, "finishReason": "STOP"}]}
        reply = CODECS["gemini"].decode_reply(json.dumps(body).encode())
        first, second = reply.message.tool_calls
        assert first.id != second.id and first.id.startswith("call_") and reply.finish == "tool_calls"

    def test_snake_case_and_other_blobs(self):
        call = decode(
            "gemini",
            {
                "system_instruction": {"parts": [{"text": "s"}]},
                "generation_config": {"max_output_tokens": 5, "thinking_config": {"thinking_budget": 0}},
                "contents": [
                    {
                        "parts": [
                            {"inline_data": {"mime_type": "image/png", "data": "AA=="}},
                            {"inline_data": {"mime_type": "video/mp4", "data": "AA=="}},
                        ]
                    },
                    {
                        "role": "model",
                        "parts": [{"function_call": {"name": "f", "args": {}}, "thought_signature": "c2ln"}],
                    },
                ],
                "tools": [
                    {
                        "function_declarations": [
                            {"name": "f", "parameters": {"type": "OBJECT", "any_of": [{"type": "STRING"}]}}
                        ]
                    }
                ],
            },
        )
        assert call.messages[0].text == "s" and call.sampling.max_tokens == 5
        assert json.loads(call.sampling.reasoning) == {"enabled": False}
        assert call.messages[1].parts[0] == Image("image/png", "AA==") and isinstance(call.messages[1].parts[1], Opaque)
        assert call.messages[2].tool_calls[0].signature == "c2ln"
        assert json.loads(call.tools[0].schema) == {"type": "object", "anyOf": [{"type": "string"}]}

    def test_a_frame_is_one_line_whatever_the_model_put_between_its_arguments(self):
        call = Call(id="c", rollout_id="r", dialect="gemini", model="m", messages=(), stream=True)
        reply = Reply(message=Message("assistant", (ToolCall("c", "f", '{\n  "a": "x\\ny"\n}'),)), finish="tool_calls")
        frames = b"".join(CODECS["gemini"].stream(call, reply))
        assert all(line.startswith(b"data: ") for line in frames.splitlines() if line)

    def test_a_keepalive_is_an_empty_text_and_never_a_comment(self):
        call = Call(id="c", rollout_id="r", dialect="gemini", model="m", messages=(), stream=True)
        frame = CODECS["gemini"].keepalive(call)
        assert frame.startswith(b"data: ") and json.loads(frame[6:])["candidates"][0]["content"]["parts"] == [
            {"text": ""}
        ]


def test_keepalives_and_openings_of_the_others():
    call = Call(id="c", rollout_id="r", dialect="chat", model="m", messages=(), stream=True)
    assert CODECS["chat"].keepalive(call).startswith(b":")
    assert CODECS["messages"].keepalive(call) == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert CODECS["responses"].keepalive(call).startswith(b"event: response.in_progress\n")
    opening = CODECS["responses"].opening(call)
    reply = Reply(message=Message("assistant", (Text("x"),)))
    later = b"".join(CODECS["responses"].stream(call, reply, opened=True))
    assert opening.count(b"event: response.created") == 1 and b"response.created" not in later
    assert opening + later == b"".join(CODECS["responses"].stream(call, reply))


def test_unknown_counts_come_from_the_ids_or_are_zero():
    from rollyard.core.call import ids

    call = Call(id="c", rollout_id="r", dialect="chat", model="m", messages=())
    known = Reply(message=Message("assistant", (Text("x"),)), prompt_ids=ids([1, 2]), completion_ids=ids([3]))
    assert json.loads(CODECS["chat"].encode(call, known))["usage"]["total_tokens"] == 3
    unknown = Reply(message=Message("assistant", (Text("x"),)), usage=Usage())
    assert json.loads(CODECS["messages"].encode(call, unknown))["usage"]["output_tokens"] == 0


def test_a_name_is_found_flat_in_its_namespace_or_alone():
    tools = (ToolSpec("a"), ToolSpec("b", namespace="n"), ToolSpec("c", namespace="n"), ToolSpec("c", namespace="m"))
    assert [resolve(tools, flat_name(tool)) for tool in tools] == [(t.namespace, t.name) for t in tools]
    assert resolve(tools, "b") == ("n", "b")
    assert resolve(tools, "c") == (None, "c")  # two of them: not ours to guess
    assert resolve(tools, "zzz") == (None, "zzz")


def test_json_schemas_and_choices_cross_dialects():
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    body = {
        "messages": [],
        "response_format": form,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "reasoning_effort": "high",
    }
    call = decode("chat", {**body, "tools": [{"type": "function", "function": {"name": "f"}}]})
    sent = {dialect: rebuilt(call, dialect) for dialect in ("responses", "messages", "gemini")}
    assert sent["responses"]["text"]["format"] == {
        "type": "json_schema",
        "name": "answer",
        "schema": {"type": "object"},
    }
    assert sent["responses"]["tool_choice"] == {"type": "function", "name": "f"}
    assert sent["messages"]["tool_choice"] == {"type": "tool", "name": "f"}
    assert sent["messages"]["output_config"]["effort"] == "high"
    assert sent["gemini"]["toolConfig"]["functionCallingConfig"] == {"mode": "ANY", "allowedFunctionNames": ["f"]}
    assert sent["gemini"]["generationConfig"]["responseJsonSchema"] == {"type": "object"}
