"""The stock of a shop over HTTP. It lives in this process: nothing but an order changes it."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STOCK = json.loads(Path("/shared/stock.json").read_text())


class Inventory(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, STOCK) if self.path == "/stock" else self.answer(404, {"error": "no such page"})

    def do_POST(self):
        order = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        part, count = order.get("part"), order.get("count")
        if self.path != "/order" or part not in STOCK or not isinstance(count, int) or count < 1:
            self.answer(400, {"error": "an order has a part that there is, and a count"})
            return
        STOCK[part] += count
        self.answer(200, {part: STOCK[part]})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Inventory).serve_forever()
