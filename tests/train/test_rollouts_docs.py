"""docs/rollouts-over-http.md: its table is that of the routes, and its commands do what it says.

`python tests/train/test_rollouts_docs.py` writes the table."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.train.service.openapi import operations
from rollyard.train.service.request import RolloutJobRequest

PAGE = Path(__file__).parents[2] / "docs" / "rollouts-over-http.md"
SCRIPT = "steps:\n  - shell: echo hello > out.txt\n  - text: done\n"


def table() -> str:
    lines = ["| request | does |", "|---|---|"]
    for one in operations(RolloutJobRequest):
        query = f"?{'&'.join(f'{name}=' for name in one.query)}" if one.query else ""
        lines.append(f"| `{one.method.upper()} {one.path}{query}` | {one.summary} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    return re.sub(
        r"(<!-- requests -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}{table()}\n{found[2]}", text, flags=re.S
    )


def test_the_table_is_that_of_the_routes():
    assert with_table(PAGE.read_text()) == PAGE.read_text(), f"run python {Path(__file__).name}"


@pytest.mark.slow
@pytest.mark.agent
def test_the_commands_do_what_the_page_says(tmp_path):
    serve, ask = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), flags=re.S)
    (tmp_path / "script.yaml").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = serve.replace("8800", port).split()
    with subprocess.Popen([sys.executable, "-m", *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and "ready" in server.stdout.readline()
            done = subprocess.run(
                ["bash", "-ec", ask.replace("8800", port)], cwd=tmp_path, capture_output=True, text=True, check=True
            )
        finally:
            server.terminate()
    job, rows = (json.loads(text) for text in done.stdout.replace("}{", "}\n{").splitlines())
    assert (job["state"], job["attempts"]) == ("done", {"done": 4})
    assert [row["reward"] for row in rows["rows"]] == [1.0] * 4


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
