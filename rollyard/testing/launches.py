"""Texts that break careless quoting, and a complete `Launch` to render an agent with. For tests of an agent of your own."""

from __future__ import annotations

from typing import Any

from rollyard.core.agent import Launch
from rollyard.core.task import McpServer

KEY = "ry-0123456789abcdefghijklmnopqrstuv"

AWKWARD: dict[str, str] = {
    "quotes": """it's "quoted" and `backticked` and \\ back\\slashed""",
    "shell": "$(touch /tmp/pwned) `touch /tmp/pwned` ; rm -rf / && $HOME ${KEY} %s %d !! * ? [a-z] ~ # | > out < in &",
    "templates": "{key} {home} {instruction} {{model}} {options} {env:ROLLYARD_KEY} ${ROLLYARD_KEY} {{ task }} {% raw %}",
    "newlines": "first\nsecond\r\nthird\n\n\ttabbed\n",
    "unicode": "žluťoučký 日本語 \U0001f986\u200d\U0001f33e \u2028 \u0085 \x7f \x1b[31m",
    "slash": "/help and @README.md",
    "dash": "--help -p -- --dangerously",
    "long": "a b'c\"d\n" * 12_000,
}


def launch(**fields: Any) -> Launch:
    """A launch with every place filled in; fields given here replace those."""
    given: dict[str, Any] = {
        "instruction": "write hello into out.txt",
        "model": "policy",
        "root_url": "http://127.0.0.1:4000/r/ro_1",
        "key": KEY,
        "home": "/home/agent",
        "workdir": "/workspace",
        "prefix": "/opt/rollyard/0123456789ab",
        "isolation": "namespace",
        "as_root": True,
    }
    return Launch(**{**given, **fields})


STDIO = McpServer(name="files", transport="stdio", command=("python3", "-m", "server", "a 'b' $(c)"), env={"A": "b\n"})
HTTP = McpServer(name="gate", url="http://127.0.0.1:4000/mcp", headers={"Authorization": f"Bearer {KEY}", "X-A": '"'})
