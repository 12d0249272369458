"""A model server that fails on demand: `python -m bench.drills.upstream PORT [HOST]`.

It plays a shell agent's model: the first turn runs a command that writes the file the verifier looks for, the second is done.
`POST /fault?kind=none|503|hang|cut` changes how it answers from now on; `hang` also catches the calls it holds when it heals.
"""

from __future__ import annotations

import asyncio
import json
import sys

import httptools

ANSWER = "sleep {pause}; echo hello > out.txt"
KINDS = ("none", "503", "hang", "cut")


class Server:
    def __init__(self) -> None:
        self.kind = "none"
        self.healed = asyncio.Event()
        self.held = 0
        self.answered = 0
        self.pause = 0.5

    def fault(self, kind: str) -> None:
        self.kind = kind
        if kind == "none":
            self.healed.set()
            self.healed = asyncio.Event()


class Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self.server = server
        self.parser = httptools.HttpRequestParser(self)
        self.url, self.body = b"", b""

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        url, body, self.url, self.body = self.url, self.body, b"", b""
        self.task = asyncio.get_running_loop().create_task(self.answer(url, body))

    async def answer(self, url: bytes, body: bytes) -> None:
        server = self.server
        if url.startswith(b"/fault"):
            server.fault(url.partition(b"kind=")[2].decode())
            return self.send(200, {"kind": server.kind})
        if url.startswith(b"/state"):
            return self.send(200, {"held": server.held, "answered": server.answered})
        if url.startswith(b"/v1/models"):  # asked for before the first call; it is the calls that fail
            return self.send(200, {"object": "list", "data": [{"id": "drill", "object": "model"}]})
        if server.kind == "503":
            return self.send(503, {"error": {"message": "overloaded", "type": "server_error"}})
        if server.kind == "hang":
            server.held += 1
            try:
                await server.healed.wait()
            finally:
                server.held -= 1
        reply = self.reply(json.loads(body))
        if server.kind == "cut":
            self.transport.write(head(200, len(reply)) + reply[: len(reply) // 2])
            self.transport.close()
            return None
        server.answered += 1
        self.transport.write(head(200, len(reply)) + reply)
        return None

    def reply(self, request: dict) -> bytes:
        message: dict = {"role": "assistant", "content": "done"}
        if not any(m["role"] == "tool" for m in request["messages"]):
            call = {"name": "shell", "arguments": json.dumps({"command": ANSWER.format(pause=self.server.pause)})}
            message = {"role": "assistant", "content": None}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": call}]
        finish = "tool_calls" if "tool_calls" in message else "stop"
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "drill"}
        answer["choices"] = [{"index": 0, "message": message, "finish_reason": finish}]
        answer["usage"] = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        return json.dumps(answer).encode()

    def send(self, status: int, value: dict) -> None:
        body = json.dumps(value).encode()
        self.transport.write(head(status, len(body)) + body)


def head(status: int, length: int) -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n".encode()


async def main(port: int, host: str) -> None:
    state = Server()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(state), host, port, backlog=512)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"))
