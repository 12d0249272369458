"""A run whose process is killed under load and resumed: `python -m bench.sigkill [--kills 3] [--tasks 24] [--parallel 8]`.

`rollyard run` with SIGKILL each time that agents were given some more answers, then resumed to its end. Counted: sandboxes and
processes that are left after each kill, attempts without a rollout or with two, and answered calls that the store lacks. Of the
last there is proof: each answer asks for a tool by an id that no other has, and an agent whose next request names that id was
given the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import sys
import tempfile
import uuid
from pathlib import Path

from aiohttp import web

import rollyard as ry
from bench.drills.driver import Driver
from bench.drills.leftovers import Leftovers
from bench.figures import note
from rollyard.core.message import ToolCall
from rollyard.trajectory.trajectory import Trajectory

CALLS = 4  # of one agent before it says that it is done
WAIT_S = 300.0


class Model:
    """Answers with one tool call after the other, and knows which answers agents have had."""

    def __init__(self) -> None:
        self.delivered: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        seen = [message["tool_call_id"] for message in body["messages"] if message["role"] == "tool"]
        self.delivered.update(seen)
        message = {"role": "assistant", "content": "done"}
        if len(seen) < CALLS:
            function = {"name": "shell", "arguments": json.dumps({"command": "sleep 0.2; echo hello > out.txt"})}
            tool = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [tool]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if len(seen) < CALLS else "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        answer = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        return web.json_response(answer)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.delivered) < count:
                await asyncio.sleep(0.02)


async def measure(kills: int, tasks: int, parallel: int) -> bool:
    model = Model()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", model.answer)
    app.router.add_get("/v1/models", model.models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        with tempfile.TemporaryDirectory(prefix="ry-bench-") as name:
            folder = Path(name)
            (folder / "home").mkdir()
            return await _run(folder, model, f"http://127.0.0.1:{port}/v1", kills, tasks, parallel)
    finally:
        await runner.cleanup()


async def _run(folder: Path, model: Model, url: str, kills: int, tasks: int, parallel: int) -> bool:
    rows = [{"id": f"t{n}", "instruction": "x", "verify": ["grep -q hello out.txt"]} for n in range(tasks)]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = folder / "run.toml"
    config.write_text(
        f'tasks = "{folder}/tasks.jsonl"\nagents = ["shell-agent"]\nbase_url = "{url}"\nmodel = "m"\n'
        f"parallel = {parallel}\nretries = 3\n"
    )
    store, home = f"{folder}/runs.db", str(folder / "home")
    driver = await asyncio.to_thread(Driver, store, config, None, home)
    sandboxes = processes = 0
    each = max(1, CALLS * tasks // (kills + 2))
    async with Leftovers(home) as left:
        for number in range(1, kills + 1):
            await model.wait(number * each)
            driver.kill()
            found = await left.wait_until_none()
            print(f"kill {number} after {len(model.delivered)} answers: left {found}", flush=True)
            sandboxes, processes = sandboxes + found["sandboxes"], processes + found["processes"]
            await asyncio.to_thread(driver.resume)
    code = await asyncio.to_thread(driver.wait, WAIT_S)
    async with ry.Store.open(store) as kept:
        done = [(r.task.id, r.reward) async for r in kept.rollouts(driver.run_id)]
        with sqlite3.connect(store) as connection:
            rollouts = [row[0] for row in connection.execute("SELECT rollout_id FROM sessions")]
        known = {tool.id for one in rollouts for tool in _tool_calls(await kept.trajectory(one))}
    right = {task for task, reward in done if reward == 1.0}
    wrong = len({row["id"] for row in rows} - right) + len(done) - len({task for task, _ in done})
    print(f"{len(rollouts)} rollouts begun, {len(done)} ended, {len(model.delivered)} answers given to agents\n")
    return all(
        [
            note("sandboxes left after SIGKILL", sandboxes, 0),
            note("processes left after SIGKILL", processes, 0),
            note("answered calls that the store lacks", len(model.delivered - known), 0),
            note("attempts lost, twice or without a reward", wrong, 0),
            note("exit code of the resumed run", code, 0),
            note("s for a resumed run to know what it owes", max(driver.resumed_s)),
        ]
    )


def _tool_calls(trajectory: Trajectory) -> list[ToolCall]:
    return [part for node in trajectory.nodes for part in node.message.parts if isinstance(part, ToolCall)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--parallel", type=int, default=8)
    args = parser.parse_args()
    return 0 if asyncio.run(measure(args.kills, args.tasks, args.parallel)) else 1


if __name__ == "__main__":
    sys.exit(main())
