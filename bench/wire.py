"""CPU microseconds per decode and encode, for a short chat and for agent turns of 30-50 kB, turn 1 against turn 20.

    python -m bench.wire

Each row is one dialect; process CPU time, best of several rounds. `decode` runs with the memo of its session, as the gate
runs it: turn 20 has seen the 19 turns before. `cold` is the same body with an empty memo. `answer` is reading a model
server's reply with ids and logprobs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from bench.figures import note
from rollyard.core.call import Reply, Sampling, Usage
from rollyard.core.message import Message, Text, Thinking, ToolCall
from rollyard.wire import CODECS
from rollyard.wire.codec import WireRequest

SYSTEM = "You are a careful engineer. " * 740  # 20 kB
SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "x" * 80} for i in range(6)}}
OUTPUT = "a line of output\n" * 50


def microseconds(run: Callable[[], Any], rounds: int = 7) -> float:
    run()
    best = float("inf")
    for _ in range(rounds):
        count, start = 0, time.process_time_ns()
        while (spent := time.process_time_ns() - start) < 30_000_000:
            for _ in range(5):
                run()
            count += 5
        best = min(best, spent / count / 1000)
    return best


def chat(turns: int) -> dict[str, Any]:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "fix the bug"}]
    for turn in range(turns - 1):
        function = {"name": "shell", "arguments": json.dumps({"command": f"ls {turn}"})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "I look.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": OUTPUT})
    tools = [
        {"type": "function", "function": {"name": f"tool{i}", "description": "d" * 300, "parameters": SCHEMA}}
        for i in range(8)
    ]
    return {"model": "m", "messages": messages, "tools": tools, "max_tokens": 8192, "tool_choice": "auto"}


def messages(turns: int) -> dict[str, Any]:
    history: list[Any] = [{"role": "user", "content": "fix the bug"}]
    for turn in range(turns - 1):
        use = {"type": "tool_use", "id": f"call_{turn}", "name": "shell", "input": {"command": f"ls {turn}"}}
        history.append({"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]})
        result = {"type": "tool_result", "tool_use_id": f"call_{turn}", "content": OUTPUT}
        history.append({"role": "user", "content": [result]})
    tools = [{"name": f"tool{i}", "description": "d" * 300, "input_schema": SCHEMA} for i in range(8)]
    return {
        "model": "m",
        "max_tokens": 8192,
        "system": [{"type": "text", "text": SYSTEM}],
        "messages": history,
        "tools": tools,
    }


def responses(turns: int) -> dict[str, Any]:
    items: list[Any] = [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": "fix the bug"}]
    for turn in range(turns - 1):
        text = {"type": "output_text", "text": "I look."}
        items.append({"type": "message", "role": "assistant", "content": [text]})
        arguments = json.dumps({"command": f"ls {turn}"})
        items.append({"type": "function_call", "call_id": f"call_{turn}", "name": "shell", "arguments": arguments})
        items.append({"type": "function_call_output", "call_id": f"call_{turn}", "output": OUTPUT})
    tools = [{"type": "function", "name": f"tool{i}", "description": "d" * 300, "parameters": SCHEMA} for i in range(8)]
    return {"model": "m", "input": items, "tools": tools, "stream": True}


def gemini(turns: int) -> dict[str, Any]:
    contents: list[Any] = [{"role": "user", "parts": [{"text": "fix the bug"}]}]
    for turn in range(turns - 1):
        call = {"id": f"call_{turn}", "name": "shell", "args": {"command": f"ls {turn}"}}
        contents.append({"role": "model", "parts": [{"text": "I look."}, {"functionCall": call}]})
        result = {"id": f"call_{turn}", "name": "shell", "response": {"output": OUTPUT}}
        contents.append({"role": "user", "parts": [{"functionResponse": result}]})
    functions = [{"name": f"tool{i}", "description": "d" * 300, "parametersJsonSchema": SCHEMA} for i in range(8)]
    tools = [{"functionDeclarations": functions}]
    return {"contents": contents, "systemInstruction": {"parts": [{"text": SYSTEM}]}, "tools": tools}


BODIES = {"chat": chat, "messages": messages, "responses": responses, "gemini": gemini}
REPLY = Reply(
    message=Message(
        "assistant",
        (
            Thinking("I wonder. " * 20),
            Text("I look at it. " * 10),
            ToolCall("call_x", "shell", '{"command": "ls -la"}'),
        ),
    ),
    finish="tool_calls",
    usage=Usage(prompt_tokens=9000, completion_tokens=64),
)


def request(body: bytes) -> WireRequest:
    return WireRequest(call_id="call_x", rollout_id="rol_x", body=body, headers={}, model="m", stream=True)


def vllm_answer(prompt: int, completion: int) -> bytes:
    """A chat answer as vLLM gives it, with ids and logprobs."""
    entries = [
        {"token": f"tok{i}", "logprob": -0.25 * i / 9, "bytes": [116], "top_logprobs": []} for i in range(completion)
    ]
    call = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        "finish_reason": "tool_calls",
        "logprobs": {"content": entries},
        "token_ids": list(range(1000, 1000 + completion)),
    }
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return json.dumps(
        {
            "id": "x",
            "model": "m",
            "choices": [choice],
            "usage": usage,
            "prompt_token_ids": list(range(500, 500 + prompt)),
        }
    ).encode()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(
        "us of CPU per call        short    turn 1 (kB)   turn 20 (kB)   turn 20 cold   whole answer   SSE answer   request"
    )
    figures: dict[str, float] = {}
    for name, build in BODIES.items():
        codec = CODECS[name]
        small = build(1)
        small.pop("tools", None)
        for member in ("system", "systemInstruction"):
            small.pop(member, None)
        for member in ("messages", "input"):
            small[member] = small[member][-1:] if member in small else None
        short = request(json.dumps({k: v for k, v in small.items() if v is not None}).encode())
        first, last = (request(json.dumps(build(turns)).encode()) for turns in (1, 20))
        memo: dict[bytes, Any] = {}
        for turns in range(1, 20):
            codec.decode(request(json.dumps(build(turns)).encode()), memo)
        fresh = json.dumps(build(20)).encode()
        known = dict(memo)

        def newest(codec=codec, known=known, fresh=fresh):
            return codec.decode(request(fresh), dict(known))

        copying = microseconds(lambda known=known: dict(known))
        call = codec.decode(last, memo)
        row = [
            microseconds(lambda codec=codec, short=short: codec.decode(short, {})),
            microseconds(lambda codec=codec, first=first, memo=memo: codec.decode(first, memo)),
            microseconds(newest) - copying,
            microseconds(lambda codec=codec, last=last: codec.decode(last)),
            microseconds(lambda codec=codec, call=call: codec.encode(call, REPLY)),
            microseconds(lambda codec=codec, call=call: b"".join(codec.stream(call, REPLY))),
            microseconds(
                lambda codec=codec, call=call: codec.encode_request(call, model="m", sampling=Sampling(), extra={})
            ),
        ]
        print(
            f"{name:22} {row[0]:8.1f} {row[1]:8.1f} ({len(first.body) / 1000:2.0f}) {row[2]:9.1f} ({len(last.body) / 1000:2.0f})"
            f" {row[3]:13.1f} {row[4]:14.1f} {row[5]:12.1f} {row[6]:9.1f}"
        )
        figures[f"us to read turn 20, {name}"] = row[2]
        figures[f"us to write an answer as SSE, {name}"] = row[5]
    decode = CODECS["chat"].decode_reply
    for prompt, completion in ((20, 16), (6500, 64), (11500, 64)):
        body, before = vllm_answer(prompt, completion), vllm_answer(max(prompt - 300, 0), completion)
        memo = {}
        decode(before, None, memo)
        seen = dict(memo)
        first = microseconds(lambda body=body: decode(body))
        later = microseconds(lambda body=body, seen=seen: decode(body, None, dict(seen)))
        size = len(body) / 1000
        print(
            f"chat answer, {prompt} prompt ids, {completion} logprobs ({size:.0f} kB): {first:.1f} us, next turn {later:.1f} us"
        )
        figures[f"us to read an answer with {prompt} prompt ids"] = later
    print()
    for name, value in figures.items():
        note(name, value)


if __name__ == "__main__":
    main()
