"""A trainer's gateway in a few lines: it answers the calls of an agent that writes a file, and remembers how it was asked."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WRITE = {"name": "shell", "arguments": json.dumps({"command": "echo hello > out.txt"})}
TURNS = [{"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": WRITE}]}, {"content": "done"}]
TASK = {"id": "hello", "instruction": "write hello to out.txt", "verify": ["test -f out.txt"]}
UNJUDGED = {"id": "none", "instruction": "say nothing"}


class Gateway(BaseHTTPRequestHandler):
    asked: list = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers["authorization"], body["model"]))
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        message = {"role": "assistant", **TURNS[turn]}
        choice = {"index": 0, "message": message, "finish_reason": ["tool_calls", "stop"][turn]}
        told = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        answer = json.dumps({**told, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words):
        pass


@contextmanager
def gateway():
    Gateway.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
