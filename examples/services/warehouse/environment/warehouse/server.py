"""An MCP server over streamable HTTP, in the standard library alone: one JSON answer to each POST."""

import json
import sys
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PARTS = ["axle", "bearing", "bolt", "chain", "gear", "nut", "pedal", "rim", "spoke", "washer"]
TOOLS = [
    {
        "name": "list_parts",
        "description": "the names of all parts",
        "inputSchema": {"type": "object", "properties": {}},
    },
    {
        "name": "stock",
        "description": "how many of a part there are, and how many there should be at least",
        "inputSchema": {"type": "object", "properties": {"part": {"type": "string"}}, "required": ["part"]},
    },
]


def stock(part):
    number = zlib.crc32(part.encode())
    return {"part": part, "in_stock": number % 40, "minimum": number // 40 % 40}


def call(name, arguments):
    if name == "list_parts":
        return json.dumps(PARTS)
    if name == "stock" and arguments.get("part") in PARTS:
        return json.dumps(stock(arguments["part"]))
    raise ValueError(f"no such tool or part: {name} {arguments}")


def answer(message):
    method, params = message["method"], message.get("params") or {}
    if method == "initialize":
        version = params.get("protocolVersion", "2025-06-18")
        server = {"name": "warehouse", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        try:
            text, bad = call(params["name"], params.get("arguments") or {}), False
        except ValueError as error:
            text, bad = str(error), True
        return {"content": [{"type": "text", "text": text}], "isError": bad}
    return {}


class Warehouse(BaseHTTPRequestHandler):
    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if "id" not in message:
            self.send_answer(202, b"")
            return
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": answer(message)}
        self.send_answer(200, json.dumps(reply).encode())

    def do_GET(self):
        self.send_answer(405, b"")

    def send_answer(self, status, data):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Warehouse).serve_forever()
