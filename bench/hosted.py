"""First and second rollout of one agent in one image on a hosted backend: seconds to provision and prepare, bytes sent.

    python -m bench.hosted [AGENT ...] [--keep-nothing]

The e2b backend with its real SDK against this project's own E2B server on the loopback, local sandboxes behind it. The bytes are
those of all request bodies. `--keep-nothing` is how it is where a provider keeps no images: the agent is uploaded every time.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import rollyard as ry
from rollyard.plane.compat.e2b import e2b_app
from rollyard.plane.parts import ephemeral_plane
from rollyard.sandbox import backend
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.providers.e2b import E2BProvider
from rollyard.testing.serve import serve_app

KEY = "e2b_" + "0" * 40
STEPS = {"steps": [{"shell": "echo hello > out.txt"}, {"text": "done"}]}


class CountedApp:
    def __init__(self, app: ASGIApp) -> None:
        self._app, self.bytes = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count() -> Message:
            message = await receive()
            self.bytes += len(message.get("body") or b"")
            return message

        await self._app(scope, count, send)


async def measure(agent: str, keep: bool) -> list[str]:
    rows: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as home:
        async with LocalBackend(root=Path(home)) as local, ephemeral_plane(local) as plane:
            counted = CountedApp(e2b_app(plane, anonymous=True))
            async with serve_app(counted) as url:
                E2BProvider.keeps_images = keep
                async with backend("e2b", key=KEY, url=url, isolation="namespace") as remote:
                    for number in (1, 2):
                        before = counted.bytes
                        done = await ry.run_rollout(
                            "write out.txt",
                            agent=agent,
                            policy=ry.policy.scripted(STEPS),
                            sandbox=remote,
                            verify=['test "$(cat out.txt)" = hello'],
                        )
                        took = {stage.name: stage.duration_s for stage in done.stages}
                        sent = (counted.bytes - before) / 2**20
                        took_s = f"{took['provision']:.2f} | {took['prepare']:.2f}"
                        rows.append(f"| {agent} | {number} | {took_s} | {sent:.2f} | {done.reward} |")
    return rows


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("agents", nargs="*", default=["pi"])
    parser.add_argument("--keep-nothing", action="store_true")
    options = parser.parse_args()
    print("| agent | rollout | provision s | prepare s | MiB sent | reward |\n|---|---|---|---|---|---|")
    for agent in options.agents:
        print("\n".join(await measure(agent, not options.keep_nothing)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
