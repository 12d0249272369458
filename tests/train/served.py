"""`rollyard serve rollouts` as a process of its own."""

import json
import signal
import sys
from contextlib import asynccontextmanager

import anyio

HELLO = "steps:\n  - shell: echo hello > out.txt\n  - text: done\n"


@asynccontextmanager
async def server(tmp_path, *words, script=HELLO, keys=None):
    """The real command; gives its URL, and the process."""
    if script is not None:
        (tmp_path / "script.yaml").write_text(script)
        words = ("--policy", f"scripted:{tmp_path}/script.yaml", *words)
    if keys is not None:
        (tmp_path / "keys").write_text("".join(f"{owner} {key}\n" for owner, key in keys.items()))
        (tmp_path / "keys").chmod(0o600)
        words = ("--keys", str(tmp_path / "keys"), *words)
    command = [sys.executable, "-m", "rollyard", "serve", "rollouts", "--store", str(tmp_path / "r.db"), "--json"]
    process = await anyio.open_process([*command, "--agent", "shell-agent", *words], stderr=None)
    try:
        line = await process.stdout.receive()
        yield json.loads(line)["url"], process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
