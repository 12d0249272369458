"""`rollyard serve plane` as people start it: a process, and what `--print-env` says."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager


@asynccontextmanager
async def serving(folder, *options, engine="local,noop", environ=None):
    """Gives the printed variables, and the process under `process`; what it says on stderr is in `folder/stderr`."""
    command = ["-c", "from rollyard.cli.main import main; main()", "serve", "plane", "--engine", engine]
    command += ["--store", str(folder / "p.db"), "--port", "0", "--print-env", "--admin-key-file", str(folder / "key")]
    with (folder / "stderr").open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, *options), stdout=asyncio.subprocess.PIPE, stderr=said,
            env={**os.environ, **(environ or {})},
        )  # fmt: skip
    try:
        env = {"process": process}
        async with asyncio.timeout(60):
            while "ROLLYARD_KEY" not in env:  # the last one
                name, _, value = (await process.stdout.readline()).decode().strip().partition("=")
                assert name, "the server ended before it was ready"
                env[name] = value
        yield env
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()
