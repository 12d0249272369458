"""The program of `shell-agent`: chat completions and one tool, on a bare python3 (3.8 or newer) inside the sandbox.

Standard library only. It prints one JSON object per line: message, result, done. Its prompts are small on purpose, so that a
tiny model with a tiny context can follow it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

URL = os.environ["SHELL_AGENT_URL"] + "/chat/completions"
KEY = os.environ.pop("ROLLYARD_KEY")  # the commands it runs do not inherit it
MODEL = os.environ["SHELL_AGENT_MODEL"]
MAX_TOKENS = os.environ.get("SHELL_AGENT_MAX_TOKENS")
OUTPUT, TURNS, TRIES = 4000, 200, 6
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "shell", "description": "Run it.", "parameters": COMMAND}}]


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"type": kind, **fields}), flush=True)


def ask(messages: list[Any], attempt: int = 1) -> Any:
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS}
    if MAX_TOKENS:
        body["max_tokens"] = int(MAX_TOKENS)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + KEY}
    request = urllib.request.Request(URL, json.dumps(body, separators=(",", ":")).encode(), headers)  # noqa: S310 - the gate
    try:
        with urllib.request.urlopen(request, timeout=3600) as response:  # noqa: S310 - the gate
            return json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if attempt == TRIES or (error.code < 500 and error.code != 429):
            raise
    time.sleep(0.1 * 2**attempt)
    return ask(messages, attempt + 1)


def shell(arguments: str) -> str:
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


def work(prompt: str, instruction: str) -> tuple[bool, str]:
    messages: list[Any] = [{"role": "system", "content": prompt}, {"role": "user", "content": instruction}]
    for _ in range(TURNS):
        message = ask(messages)
        say("message", message=message)
        messages.append({name: value for name, value in message.items() if value is not None})
        if not message.get("tool_calls"):
            return True, message.get("content") or ""
        for call in message["tool_calls"]:
            text = shell(call["function"]["arguments"])
            say("result", id=call["id"], text=text)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return False, f"not done after {TURNS} turns"


if __name__ == "__main__":
    try:
        ok, words = work(*(Path(path).read_bytes().decode() for path in sys.argv[1:3]))
    except (OSError, ValueError, LookupError) as error:
        ok, words = False, f"{type(error).__name__}: {error}"
    say("done", ok=ok, text=words)
    sys.exit(0 if ok else 1)
