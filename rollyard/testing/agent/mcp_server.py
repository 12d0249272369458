"""A small MCP server for the suite, on a bare python3: `mcp_server.py TOOL` on stdio, `mcp_server.py TOOL PORT TOKEN` over
HTTP; `mcp_server.py ping PORT` says whether one listens."""

from __future__ import annotations

import http.server
import json
import socket
import sys
from typing import Any

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def answer(message: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The reply to one JSON-RPC message; None to a notification."""
    if "id" not in message:
        return None
    method = message["method"]
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        result = {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": name, "version": "1"},
        }
    elif method == "tools/list":
        result = {"tools": [{"name": name, "description": "Says a number.", "inputSchema": SCHEMA}]}
    elif method == "tools/call":
        text = f"{name} says {message['params'].get('arguments', {}).get('n')}"
        result = {"content": [{"type": "text", "text": text}]}
    elif method == "ping":
        result = {}
    else:
        return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "no such method"}}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


class Handler(http.server.BaseHTTPRequestHandler):
    name, token = "", ""
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            self.reply(401, b"")
            return
        found = answer(json.loads(body), self.name)
        self.reply(202, b"") if found is None else self.reply(200, json.dumps(found).encode())

    def do_GET(self) -> None:
        self.reply(405, b"")

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


if __name__ == "__main__":
    word, *rest = sys.argv[1:]
    if word == "ping":
        sys.exit(socket.socket().connect_ex(("127.0.0.1", int(rest[0]))))
    elif rest:
        Handler.name, Handler.token = word, rest[1]
        http.server.ThreadingHTTPServer(("127.0.0.1", int(rest[0])), Handler).serve_forever()
    else:
        for line in sys.stdin:
            reply = answer(json.loads(line), word)
            if reply is not None:
                print(json.dumps(reply), flush=True)
