"""An MCP server over stdio, in the standard library alone: one JSON object per line."""

import json
import sys
import zlib

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


def main():
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            reply = {"jsonrpc": "2.0", "id": message["id"], "result": answer(message)}
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
