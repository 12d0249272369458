"""A model server that costs almost nothing: replies are serialised once, a nonce is patched in. It answers as vLLM does with
`return_token_ids` (prompt ids at the top, ids and logprobs per choice), as chat completions, Messages and Responses, whole or
as a stream of 64 token events. Several may share a port.

    python -m bench.model_server PORT
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys

import httptools
import uvloop

DELAY_S = 0.3  # give or take half, for requests that say DELAY; those that say HOLD wait for /release
NONCE = re.compile(rb"NONCE(\d{6})")
SHORT, LONG = 16, 64  # tokens of a whole reply, of a streamed one
SYSTEM_IDS = 5200  # of an agent's first prompt
TURN_IDS = 210  # that each tool result adds
END = "done."


def completion(tokens: int, nonce: str) -> str:
    return " ".join(["word"] * (tokens - 2) + [nonce, END])


def sample_ids(turn: int, tokens: int) -> list[int]:
    return [1000 + (turn * 131 + i * 7) % 30000 for i in range(tokens)]


def prompt_ids(turn: int, base: int) -> list[int]:
    """The prompt of turn n begins with the prompt and the answer of turn n-1."""
    out = [(i * 17) % 30000 for i in range(base)]
    for earlier in range(turn):
        out += sample_ids(earlier, SHORT)
        out += [(i * 13 + earlier) % 30000 for i in range(TURN_IDS)]
    return out


def logprobs(tokens: int) -> dict:
    return {"content": [{"token": "word", "logprob": -0.125, "bytes": None, "top_logprobs": []}] * tokens}


def chat(turn: int, *, agent: bool) -> bytes:
    base = SYSTEM_IDS if agent else 24
    prompt = prompt_ids(turn, base)
    message: dict = {"role": "assistant", "content": completion(SHORT, "NONCE0")}
    if agent:
        call = {"name": "bash", "arguments": json.dumps({"command": f"ls -l /src/module_{turn}"})}
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": call}]
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "bench",
            "prompt_token_ids": prompt,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": "tool_calls" if agent else "stop",
                    "logprobs": logprobs(SHORT),
                    "token_ids": sample_ids(turn, SHORT),
                }
            ],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": SHORT, "total_tokens": len(prompt) + SHORT},
        },
        separators=(",", ":"),
    ).encode()


def chat_stream() -> bytes:
    words = completion(LONG, "NONCE0").split(" ")
    out = []
    for i, word in enumerate(words):
        delta = {"content": word + ("" if i == len(words) - 1 else " ")}
        if i == 0:
            delta["role"] = "assistant"
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        out.append({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "bench", "choices": [choice]})
    out.append({**out[-1], "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return b"".join(b"data: " + json.dumps(o).encode() + b"\n\n" for o in out) + b"data: [DONE]\n\n"


def messages_stream() -> bytes:
    words = completion(LONG, "NONCE0").split(" ")
    head = {"type": "message", "id": "msg_1", "role": "assistant", "model": "bench", "content": [], "stop_reason": None}
    events = [{"type": "message_start", "message": {**head, "usage": {"input_tokens": 24, "output_tokens": 1}}}]
    events.append({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    for i, word in enumerate(words):
        text = word + ("" if i == len(words) - 1 else " ")
        events.append({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
    events.append({"type": "content_block_stop", "index": 0})
    events.append({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": LONG}})
    events.append({"type": "message_stop"})
    return b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events)


def responses_stream() -> bytes:
    words = completion(LONG, "NONCE0").split(" ")
    base = {"id": "resp_1", "object": "response", "model": "bench", "status": "in_progress", "output": []}
    events = [{"type": "response.created", "response": base}]
    for i, word in enumerate(words):
        text = word + ("" if i == len(words) - 1 else " ")
        events.append({"type": "response.output_text.delta", "item_id": "msg_1", "output_index": 0, "delta": text})
    part = {"type": "output_text", "text": completion(LONG, "NONCE0"), "annotations": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    usage = {"input_tokens": 24, "output_tokens": LONG, "total_tokens": 24 + LONG}
    whole = {**base, "status": "completed", "output": [item], "usage": usage}
    events.append({"type": "response.completed", "response": whole})
    return b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events)


def delay_s(nonce: int) -> float:
    """How long the answer to a request that says DELAY is thought about. Spread evenly over any numbers that follow each other,
    and known to the client, which can tell what was added to it."""
    return DELAY_S * (0.5 + nonce * 0.618034 % 1)


class Library:
    """Everything that can be asked for, serialised once."""

    def __init__(self) -> None:
        self.short = chat(0, agent=False)
        self.turns = [chat(turn, agent=True) for turn in range(32)]
        long = json.loads(self.short)
        long["choices"][0]["message"]["content"] = completion(LONG, "NONCE0")
        long["choices"][0]["logprobs"] = logprobs(LONG)
        long["choices"][0]["token_ids"] = sample_ids(0, LONG)
        self.long = json.dumps(long, separators=(",", ":")).encode()
        self.streams = {
            b"/v1/chat/completions": chat_stream(),
            b"/v1/messages": messages_stream(),
            b"/v1/responses": responses_stream(),
        }

    def answer(self, path: bytes, body: bytes) -> tuple[bytes, bytes]:
        if b'"stream":true' in body or b'"stream": true' in body:
            return b"text/event-stream", self.streams[path]
        if b'"tools"' in body:
            return b"application/json", self.turns[body.count(b'"role":"assistant"')]
        return b"application/json", self.long if b"LONG" in body else self.short


class Server(asyncio.Protocol):
    def __init__(self, library: Library, held: set) -> None:
        self.library, self.held = library, held
        self.parser = httptools.HttpRequestParser(self)
        self.transport = None

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.body = b"", []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        path, body = self.url.partition(b"?")[0], b"".join(self.body)
        if path == b"/held":
            self.write(b"application/json", b"%d" % len(self.held))
        elif path == b"/release":
            waiting, loop = list(self.held), asyncio.get_running_loop()
            self.held.clear()
            for answer in waiting:
                loop.call_soon(answer)
            self.write(b"application/json", b"{}")
        elif path.endswith(b"/models"):
            self.write(b"application/json", b'{"object":"list","data":[{"id":"bench","object":"model"}]}')
        elif b"HOLD" in body:
            self.held.add(lambda: self.reply(path, body))
        elif b"DELAY" in body:
            found = NONCE.search(body)
            nonce = random.randrange(10**6) if found is None else int(found[1])
            asyncio.get_running_loop().call_later(delay_s(nonce), self.reply, path, body)
        else:
            self.reply(path, body)

    def reply(self, path: bytes, body: bytes) -> None:
        kind, answer = self.library.answer(path, body)
        if (nonce := NONCE.search(body)) is not None:
            answer = answer.replace(b"NONCE0", nonce[1])
        self.write(kind, answer)

    def write(self, kind: bytes, body: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
            self.transport.write(head + body)


async def main(port: int) -> None:
    library, held = Library(), set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Server(library, held), "127.0.0.1", port, backlog=4096, reuse_port=True)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
