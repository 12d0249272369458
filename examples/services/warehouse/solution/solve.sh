#!/bin/sh
cd /app && python3 - <<'END'
import itertools
import json
import urllib.request

numbers = itertools.count(1)


def ask(method, **params):
    message = {"jsonrpc": "2.0", "id": next(numbers), "method": method, "params": params}
    request = urllib.request.Request("http://warehouse:8000/mcp", json.dumps(message).encode())
    return json.load(urllib.request.urlopen(request, timeout=10))["result"]


def tool(name, **arguments):
    return json.loads(ask("tools/call", name=name, arguments=arguments)["content"][0]["text"])


client = {"name": "solution", "version": "1"}
ask("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=client)
stocks = [tool("stock", part=part) for part in sorted(tool("list_parts"))]
with open("order.txt", "w") as out:
    for s in stocks:
        if s["in_stock"] < s["minimum"]:
            print(s["part"], s["minimum"] - s["in_stock"], file=out)
END
