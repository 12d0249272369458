"""The program of `terminus-2`: Harbor's own agent, given the sandbox it runs in as its environment.

Harbor runs Terminus on the host and reaches into a container. Here it runs inside, so that it has the same gate, key and
watch as every other agent. It needs tmux in the image, and prints one JSON object per line: step, done.
"""

# pyright: basic

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.agents.terminus_2.terminus_2 import Terminus2  # type: ignore[import-not-found] - in the agent's layer
from harbor.environments.base import ExecResult  # type: ignore[import-not-found]
from harbor.models.agent.context import AgentContext  # type: ignore[import-not-found]
from harbor.models.trial.paths import EnvironmentPaths  # type: ignore[import-not-found]

POLL_S = 0.2


class OwnSandbox:
    """The sandbox that this program runs in, as Terminus expects an environment."""

    default_user = None

    async def exec(self, command: str, timeout_sec: float | None = None, **_: Any) -> ExecResult:
        program = await asyncio.create_subprocess_exec(
            "bash", "-c", command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(program.communicate(), timeout_sec or 600)
        except TimeoutError:
            program.kill()
            return ExecResult(stdout="", stderr="timed out", return_code=124)
        return ExecResult(
            stdout=out.decode("utf-8", "replace"),
            stderr=err.decode("utf-8", "replace"),
            return_code=program.returncode or 0,
        )

    async def is_dir(self, path: str, **_: Any) -> bool:
        return Path(path).is_dir()


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"type": kind, **fields}, default=str), flush=True)


async def tell_steps(trajectory: Path) -> None:
    """Steps as they are written to its trajectory file."""
    told = 0
    while True:
        with contextlib.suppress(OSError, ValueError):  # not there yet, or half written
            steps = json.loads(trajectory.read_text())["steps"]
            for step in steps[told:]:
                say("step", step=step)
            told = len(steps)
        await asyncio.sleep(POLL_S)


async def main(task: str, place: str) -> None:
    if shutil.which("tmux") is None:
        raise RuntimeError("terminus-2 needs tmux, and this image has none")
    logs = Path(place)
    logs.mkdir(parents=True, exist_ok=True)
    EnvironmentPaths.agent_dir = PurePosixPath(logs)
    window = int(os.environ["TERMINUS_CONTEXT"])
    agent = Terminus2(
        logs_dir=logs,
        model_name=os.environ["TERMINUS_MODEL"],
        api_base=os.environ["HOSTED_VLLM_API_BASE"],
        record_terminal_session=False,
        suppress_max_turns_warning=True,
        model_info={
            "max_input_tokens": window,
            "max_output_tokens": 8192,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        },
    )
    teller = asyncio.create_task(tell_steps(logs / "trajectory.json"))
    try:
        await agent.setup(OwnSandbox())
        await agent.run(Path(task).read_bytes().decode(), OwnSandbox(), AgentContext())
        await asyncio.sleep(2 * POLL_S)
    finally:
        teller.cancel()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:3]))
    except Exception as error:  # noqa: BLE001 - whatever ended it is its last word
        say("done", ok=False, text=f"{type(error).__name__}: {error}")
        sys.exit(1)
    say("done", ok=True, text="")
