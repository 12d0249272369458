"""The thinnest agent there is, for measurements in which agents should cost next to nothing: one bash that asks once.

It fails when it is not answered with a 200. `write` puts it into a folder and gives the file to name in a run's `agents`.
"""

from __future__ import annotations

from pathlib import Path

NAME = "thin"
AGENT = """
name = "thin"
version = "1.0.0"
summary = "one bash that asks once"
argv = ["bash", "{prefix}/bin/thin"]
[layer]
folder = "thin"
[env]
MODEL_URL = "{base_url}"
MODEL_KEY = "{key}"
[wires.chat]
"""
PROGRAM = r"""#!/bin/bash
url=${MODEL_URL#http://} host=${url%%/*}
body='{"model":"drill","messages":[{"role":"user","content":"hello"}]}'
exec 3<>/dev/tcp/${host%:*}/${host##*:}
{
  printf 'POST /%s/chat/completions HTTP/1.1\r\nhost: %s\r\n' "${url#*/}" "$host"
  printf 'authorization: Bearer %s\r\ncontent-type: application/json\r\n' "$MODEL_KEY"
  printf 'content-length: %d\r\nconnection: close\r\n\r\n%s' ${#body} "$body"
} >&3
read -r line <&3
[[ $line == *" 200"* ]]
"""


def write(folder: Path) -> Path:
    (folder / NAME / "bin").mkdir(parents=True, exist_ok=True)
    (folder / NAME / "bin" / NAME).write_text(PROGRAM)
    agent = folder / f"{NAME}.toml"
    agent.write_text(AGENT)
    return agent
