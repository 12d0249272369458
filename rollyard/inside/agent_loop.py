"""The program of `shell-agent` and `tool-agent`: chat completions and tools, on a bare python3 (3.8 or newer) inside the sandbox.

    agent_loop.py PROMPT INSTRUCTION [MCP_CONFIG]

Its tools are those of the MCP servers that a config names, or one shell. Standard library only. It prints one JSON object per
line: message, result, done. Its requests are small on purpose, so that a tiny model with a tiny context can follow it.
Images that tools give follow in a message of the user's: that is where every chat server takes them. Where there is a tool
`computer`, the model sees the screen with its instruction.

It loads little: most of what a short rollout costs is the start of this program, and `urllib` and `typing` are half of that. A
server on loopback, as the gate is, is asked over a socket; any other by `urllib`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Call = Callable[[str, str], tuple[str, list[Any]]]
    Answer = tuple[int, str, Mapping[str, str], bytes]  # status, reason, headers by lower-case name, body

URL = os.environ["AGENT_LOOP_URL"] + "/chat/completions"
KEY = os.environ.pop("ROLLYARD_KEY")  # the commands it runs do not inherit it
MODEL = os.environ["AGENT_LOOP_MODEL"]
MAX_TOKENS = os.environ.get("AGENT_LOOP_MAX_TOKENS")
SESSION = os.path.join(os.path.dirname(os.path.abspath(__file__)), "session.json")
OUTPUT, TURNS, TRIES, TIMEOUT_S = 4000, 200, 6, 3600
LOOPBACK = "http://127.0.0.1:"
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
COMPUTER = "computer"
SHELL = {"type": "function", "function": {"name": "shell", "description": "Run it.", "parameters": COMMAND}}


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"type": kind, **fields}), flush=True)


def post(url: str, body: dict[str, Any], headers: dict[str, str], attempt: int = 1) -> tuple[bytes, Mapping[str, str]]:
    sent = {"Content-Type": "application/json", **headers}
    send = send_here if url.startswith(LOOPBACK) else send_away
    status, reason, given, answer = send(url, json.dumps(body, separators=(",", ":")).encode(), sent)
    if status < 300:
        return answer, given
    if attempt == TRIES or (status < 500 and status != 429):
        raise OSError(f"HTTP Error {status}: {reason}")
    time.sleep(0.1 * 2**attempt)
    return post(url, body, headers, attempt + 1)


def send_here(url: str, body: bytes, headers: dict[str, str]) -> Answer:
    port, _, path = url[len(LOOPBACK) :].partition("/")
    head = {"Host": "127.0.0.1:" + port, "Content-Length": str(len(body)), "Connection": "close", **headers}
    lines = ["POST /" + path + " HTTP/1.1", *(name + ": " + value for name, value in head.items()), "", ""]
    with socket.create_connection(("127.0.0.1", int(port)), TIMEOUT_S) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        with connection.makefile("rb") as stream:
            return read_answer(stream)


def read_answer(stream: Any) -> Answer:
    _, status, *reason = stream.readline().decode("latin-1").split(None, 2) or ("", "0")
    headers: dict[str, str] = {}
    for line in iter(stream.readline, b"\r\n"):
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon:
            raise OSError("the server closed the connection before its answer was complete")
        headers[name.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return int(status), "".join(reason).strip(), headers, b"".join(read_chunks(stream))
    length = int(headers["content-length"]) if "content-length" in headers else -1
    body = stream.read(length)
    if len(body) < length:
        raise OSError("the server closed the connection before its answer was complete")
    return int(status), "".join(reason).strip(), headers, body


def read_chunks(stream: Any) -> list[bytes]:
    chunks: list[bytes] = []
    while True:
        size = int(stream.readline().split(b";")[0], 16)
        chunk = stream.read(size)
        if size == 0:
            return chunks
        if len(chunk) < size:
            raise OSError("the server closed the connection before its answer was complete")
        chunks.append(chunk)
        stream.readline()


def send_away(url: str, body: bytes, headers: dict[str, str]) -> Answer:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, body, headers)  # noqa: S310 - the operator's own address
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - as above
            given = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, answer.reason, given, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.reason, {}, b""


def ask(messages: list[Any], tools: list[Any]) -> Any:
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": tools}
    if MAX_TOKENS:
        body["max_tokens"] = int(MAX_TOKENS)
    answer, _ = post(URL, body, {"Authorization": "Bearer " + KEY})
    return json.loads(answer)["choices"][0]["message"]


def run_shell(name: str, arguments: str) -> tuple[str, list[Any]]:
    return run_command(arguments), []


def run_command(arguments: str) -> str:
    try:
        command = json.loads(arguments)["command"]
        done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, timeout=600)
    except subprocess.TimeoutExpired:
        return "timed out"
    except (ValueError, KeyError, TypeError) as error:
        return f"bad arguments: {error!r}"
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    if len(text) > OUTPUT:
        text = f"{text[: OUTPUT // 2]}\n...\n{text[-OUTPUT // 2 :]}"
    return text if done.returncode == 0 else f"{text}exit code {done.returncode}"


class Server:
    """One MCP server, with the session and the version that it gave."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url = url
        self._headers = {name: value.replace("${ROLLYARD_KEY}", KEY) for name, value in headers.items()}
        self._headers["Accept"] = "application/json, text/event-stream"
        about = {"name": "tool-agent", "version": "1"}
        given = self.ask("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": about})
        self._headers["MCP-Protocol-Version"] = given["protocolVersion"]
        post(self._url, {"jsonrpc": "2.0", "method": "notifications/initialized"}, self._headers)

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        said, headers = post(self._url, body, self._headers)
        if headers.get("mcp-session-id"):
            self._headers["Mcp-Session-Id"] = headers["mcp-session-id"]
        raw = said.decode()
        if not raw.lstrip().startswith("{"):  # an event stream: its last message is the answer
            raw = [line[5:] for line in raw.splitlines() if line.startswith("data:")][-1]
        answer = json.loads(raw)
        if "error" in answer:
            raise ValueError(answer["error"]["message"])
        return answer["result"]


class Servers:
    """The tools of the MCP servers in a config."""

    def __init__(self, config: str) -> None:
        self.tools: list[Any] = []
        self._owners: dict[str, Server] = {}
        for one in json.loads(config)["mcpServers"].values():
            server = Server(one["url"], one.get("headers", {}))
            for tool in server.ask("tools/list", {})["tools"]:
                shown = {"name": tool["name"], "description": tool.get("description", "")}
                self.tools.append({"type": "function", "function": {**shown, "parameters": tool["inputSchema"]}})
                self._owners[tool["name"]] = server

    def call(self, name: str, arguments: str) -> tuple[str, list[Any]]:
        """The text of its answer, and the images as parts of a message."""
        if name not in self._owners:
            return f"there is no tool named {name!r}", []
        try:
            result = self._owners[name].ask("tools/call", {"name": name, "arguments": json.loads(arguments or "{}")})
        except (OSError, ValueError) as error:
            return f"error: {error}", []
        parts = result.get("content", ())
        text = "\n".join(part["text"] for part in parts if part.get("text"))
        images = [show_image(part) for part in parts if part.get("type") == "image"]
        return (f"error: {text}" if result.get("isError") else text), images


def show_image(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("mimeType") or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{part['data']}"}}


def first_message(instruction: str, tools: list[Any], call_tool: Call) -> Any:
    """The instruction, and the screen where there is one."""
    if all(tool["function"]["name"] != COMPUTER for tool in tools):
        return instruction
    text, images = call_tool(COMPUTER, json.dumps({"action": "screenshot"}))
    if not images:
        raise ValueError(f"there is no first screenshot: {text or 'no image'}")
    return [{"type": "text", "text": instruction}, *images]


def begin(prompt: str, instruction: str, tools: list[Any], call_tool: Call) -> list[Any]:
    """The messages to go on from: those of its session, or the first ones."""
    if os.environ.get("AGENT_LOOP_RESUME"):
        return [*json.loads(read(SESSION)), {"role": "user", "content": instruction}]
    first = first_message(instruction, tools, call_tool)
    return [{"role": "system", "content": prompt}, {"role": "user", "content": first}]


def keep_session(messages: list[Any]) -> None:
    with suppress(OSError), open(SESSION, "w", encoding="utf-8") as file:  # a disk that is full is no reason to end
        file.write(json.dumps(messages))


def read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read().decode()


def work(prompt: str, instruction: str, tools: list[Any], call_tool: Call) -> tuple[bool, str]:
    messages = begin(prompt, instruction, tools, call_tool)
    for _ in range(TURNS):
        keep_session(messages)
        message = ask(messages, tools)
        say("message", message=message)
        messages.append({name: value for name, value in message.items() if value is not None})
        if not message.get("tool_calls"):
            keep_session(messages)
            return True, message.get("content") or ""
        seen: list[Any] = []
        for call in message["tool_calls"]:
            name = call["function"]["name"]
            text, images = call_tool(name, call["function"]["arguments"])
            say("result", id=call["id"], tool=name, text=text, images=len(images))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            seen += images
        if seen:
            messages.append({"role": "user", "content": seen})
    return False, f"not done after {TURNS} turns"


def main(prompt: str, instruction: str, config: str = "") -> tuple[bool, str]:
    if not config:
        return work(prompt, instruction, [SHELL], run_shell)
    if not os.path.exists(config):
        return False, "this agent has no tools of its own, and was offered none"
    servers = Servers(read(config))
    return work(prompt, instruction, servers.tools, servers.call)


if __name__ == "__main__":
    try:
        ok, words = main(*(read(path) for path in sys.argv[1:3]), *sys.argv[3:4])
    except (OSError, ValueError, LookupError) as error:
        ok, words = False, f"{type(error).__name__}: {error}"
    say("done", ok=ok, text=words)
    sys.exit(0 if ok else 1)
