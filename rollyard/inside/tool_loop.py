"""The program of `tool-agent`: chat completions and the tools of MCP servers, on a bare python3 inside the sandbox.

Standard library only. It prints one JSON object per line: message, result, done.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

URL = os.environ["TOOL_AGENT_URL"] + "/chat/completions"
KEY = os.environ["ROLLYARD_KEY"]
MODEL = os.environ["TOOL_AGENT_MODEL"]
TURNS, TRIES = 200, 6


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"type": kind, **fields}), flush=True)


def post(url: str, body: dict[str, Any], headers: dict[str, str], attempt: int = 1) -> tuple[bytes, Any]:
    sent = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)  # noqa: S310 - the gate
    try:
        with urllib.request.urlopen(request, timeout=3600) as response:  # noqa: S310 - the gate
            return response.read(), response.headers
    except urllib.error.HTTPError as error:
        if attempt == TRIES or (error.code < 500 and error.code != 429):
            raise
    time.sleep(0.1 * 2**attempt)
    return post(url, body, headers, attempt + 1)


class Server:
    """One MCP server, with the session and the version that it gave."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url = url
        self._headers = {name: value.replace("${ROLLYARD_KEY}", KEY) for name, value in headers.items()}
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


def called(server: Server | None, name: str, arguments: str) -> str:
    if server is None:
        return f"there is no tool named {name!r}"
    try:
        result = server.ask("tools/call", {"name": name, "arguments": json.loads(arguments or "{}")})
    except (OSError, ValueError) as error:
        return f"error: {error}"
    text = "\n".join(part.get("text", "") for part in result.get("content", ()))
    return f"error: {text}" if result.get("isError") else text


def work(prompt: str, instruction: str, config: str) -> tuple[bool, str]:
    tools: list[Any] = []
    owners: dict[str, Server] = {}
    for one in json.loads(config)["mcpServers"].values():
        server = Server(one["url"], one.get("headers", {}))
        for tool in server.ask("tools/list", {})["tools"]:
            shown = {"name": tool["name"], "description": tool.get("description", "")}
            tools.append({"type": "function", "function": {**shown, "parameters": tool["inputSchema"]}})
            owners[tool["name"]] = server
    messages: list[Any] = [{"role": "system", "content": prompt}, {"role": "user", "content": instruction}]
    for _ in range(TURNS):
        body = {"model": MODEL, "messages": messages, "tools": tools}
        answer = json.loads(post(URL, body, {"Authorization": "Bearer " + KEY})[0])
        message = answer["choices"][0]["message"]
        say("message", message=message)
        messages.append({name: value for name, value in message.items() if value is not None})
        if not message.get("tool_calls"):
            return True, message.get("content") or ""
        for call in message["tool_calls"]:
            name = call["function"]["name"]
            text = called(owners.get(name), name, call["function"]["arguments"])
            say("result", id=call["id"], tool=name, text=text)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return False, f"not done after {TURNS} turns"


if __name__ == "__main__":
    try:
        ok, words = work(*(Path(path).read_bytes().decode() for path in sys.argv[1:4]))
    except (OSError, ValueError, LookupError) as error:
        ok, words = False, f"{type(error).__name__}: {error}"
    say("done", ok=ok, text=words)
    sys.exit(0 if ok else 1)
