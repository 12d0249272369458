"""`rollyard serve plane` as people start it: a process, and what `--print-env` says."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager


@asynccontextmanager
async def serving(folder, *options, engine="local,noop", environ=None):
    """Gives the printed variables, the ready line under `ready` and the process under `process`."""
    command = ["-c", "from rollyard.cli.main import main; main()", "serve", "plane", "--engine", engine]
    command += ["--store", str(folder / "p.db"), "--port", "0", "--print-env", "--admin-key-file", str(folder / "key")]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *options, stdout=asyncio.subprocess.PIPE, env={**os.environ, **(environ or {})}
    )
    try:
        env = {"process": process}
        async with asyncio.timeout(60):
            while "ready" not in env:
                line = (await process.stdout.readline()).decode().strip()
                assert line, "the server ended before it was ready"
                if line.startswith("rollyard plane ready at http://127.0.0.1:"):
                    env["ready"] = line
                else:
                    name, _, value = line.partition("=")
                    env[name] = value
        yield env
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()
