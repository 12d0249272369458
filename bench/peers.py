"""Gates of others, from PyPI, each in a venv of its own under $ROLLYARD_CACHE: what they record is stated beside them.

rllm      rllm-model-gateway 0.1.0, memory store: messages, token ids and logprobs of each call, history whole every time
openenv   OpenEnv 0.10.0 capture proxy, level tokens: a graph of calls with ids and logprobs, in memory

Neither writes anything to disk here. A stream is answered by openenv from a non-streaming call, as ours is.
"""

from __future__ import annotations

import sys
import time
import urllib.request
from pathlib import Path

from tests.servers.venvs import make_venv, venv_path

REQUIREMENTS = {
    "rllm": ("uvloop", "rllm-model-gateway==0.1.0"),
    "openenv": ("uvloop", "openenv==0.10.0"),
}
OPENENV = """
import sys, uvicorn
from openenv.core.harness.capture.server import create_app
app = create_app(llm_url=sys.argv[1], model="bench", capture_level="tokens")
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error", access_log=False, backlog=4096)
"""


def venv(name: str) -> Path:
    """The peer's interpreter, installed on first use."""
    if not venv_path(name, REQUIREMENTS[name]).exists():
        print(f"installing {name} ...", file=sys.stderr)
    return Path(make_venv(name, REQUIREMENTS[name]))


def command(name: str, upstream: str, port: int) -> list[str]:
    python = venv(name)
    if name == "rllm":
        tool = str(python.with_name("rllm-model-gateway"))
        return [tool, "--port", str(port), "--worker", f"{upstream}/v1", "--store", "memory", "--log-level", "ERROR"]
    return [str(python), "-c", OPENENV, f"{upstream}/v1", str(port)]


def wait(port: int, seconds: float = 60.0) -> float:
    """Seconds until its /health answers."""
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return time.perf_counter() - began
        except OSError:
            time.sleep(0.02)
    raise TimeoutError(f"nothing answers on port {port}")
