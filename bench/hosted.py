"""First and second rollout of one agent in one image on a hosted backend: seconds to provision and prepare, bytes sent.

    python -m bench.hosted [AGENT ...] [--keep-nothing]

The e2b backend with its real SDK against this project's own E2B server on the loopback, local sandboxes behind it. The bytes are
those of all request bodies. `--keep-nothing` is how it is where a provider keeps no images: the agent is uploaded every time.
The budgets are for the second rollout: less than a second to prepare, and nothing large is sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import rollyard as ry
from bench.figures import note, stop_here
from rollyard.plane.compat.e2b import e2b_app
from rollyard.plane.parts import ephemeral_plane
from rollyard.sandbox import backend
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.sandbox.providers.e2b import E2BProvider
from rollyard.testing.serve import serve_app

KEY = "e2b_" + "0" * 40
STEPS = {"steps": [{"shell": "echo hello > out.txt"}, {"text": "done"}]}
MAX_PREPARE_S = 1.0
MAX_MIB = 1.0


class Took(NamedTuple):
    provision_s: float
    prepare_s: float
    mib: float
    reward: float | None


class CountedApp:
    def __init__(self, app: ASGIApp) -> None:
        self._app, self.bytes = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count() -> Message:
            message = await receive()
            self.bytes += len(message.get("body") or b"")
            return message

        await self._app(scope, count, send)


async def measure(agent: str, keep: bool) -> list[Took]:
    rows: list[Took] = []
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as home:
        async with LocalBackend(root=Path(home)) as local, ephemeral_plane(local) as plane:
            counted = CountedApp(e2b_app(plane, anonymous=True))
            async with serve_app(counted) as url:
                E2BProvider.keeps_images = keep
                async with backend("e2b", key=KEY, url=url, isolation="namespace") as remote:
                    for _ in range(2):
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
                        rows.append(Took(took["provision"], took["prepare"], sent, done.reward))
    return rows


async def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", default=["pi"])
    parser.add_argument("--keep-nothing", action="store_true")
    options = parser.parse_args()
    if importlib.util.find_spec("e2b") is None:
        stop_here("the package e2b is not installed: pip install 'rollyard[e2b]'")
    print("| agent | rollout | provision s | prepare s | MiB sent | reward |\n|---|---|---|---|---|---|")
    seconds: dict[str, Took] = {}
    for agent in options.agents:
        for number, row in enumerate(rows := await measure(agent, not options.keep_nothing), 1):
            took = f"{row.provision_s:.2f} | {row.prepare_s:.2f} | {row.mib:.2f}"
            print(f"| {agent} | {number} | {took} | {row.reward} |", flush=True)
        seconds[agent] = rows[-1]
    print()
    if options.keep_nothing:
        return True
    return all(
        [
            within
            for agent, row in seconds.items()
            for within in (
                note(f"s to prepare {agent}, second rollout", row.prepare_s, MAX_PREPARE_S),
                note(f"MiB sent for {agent}, second rollout", row.mib, MAX_MIB),
            )
        ]
    )


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
