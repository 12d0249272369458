"""The same training with its rollouts on a Ray cluster: agents and gates on the workers, the trainer holds a `RayRollouts`.

    python examples/grpo/on_ray.py --steps 3 --warm 100 --out out/grpo-ray        (starts two Ray nodes on this machine)
    python examples/grpo/on_ray.py --address auto --store postgresql://...        (your own cluster)

The model is served over HTTP with exact tokens; each worker's gate asks it directly. Every attempt of a group comes back once:
with rows, or with the reason why it has none. A group that is more than one version old when the weights change is given up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import torch
import uvicorn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.grpo.learn import WARM, Learner, warm_up
from examples.grpo.world import SYSTEM, answered, renderer, task
from rollyard import train as ry_train
from rollyard.core.limits import Limits
from rollyard.net.binding import listen
from rollyard.train.sampler import Sampler
from rollyard.train.server import ModelServer
from rollyard.train.tiny import TinyConfig, TinyModel
from rollyard.trajectory.samples import Sample
from tests.servers.postgres import PostgresServer
from tests.servers.ray_cluster import RayCluster

ROOT = Path(__file__).resolve().parents[2]
GROUP, STALENESS = 8, 1
POLICY = "tokens:{url}#renderer=examples.grpo.world:renderer&kind=torch&max_tokens_cap=16"


async def groups(rollouts: ry_train.RayRollouts, count: int) -> tuple[list[Sample], list[float], int]:
    """Take until `count` attempts have come out, whatever became of them."""
    rows: list[Sample] = []
    rewards: list[float] = []
    came = without = 0
    while came < count:
        for scored in await asyncio.to_thread(rollouts.take, timeout=120):
            came += 1
            rows += scored.rows
            if scored.reward is not None and scored.why is None:
                rewards.append(scored.reward)
            else:
                without += 1
                print(f"  no row of {scored.task_id} #{scored.number}: {scored.why} {scored.message[:100]}", flush=True)
    return rows, rewards, without


async def train(args: argparse.Namespace, stack: AsyncExitStack) -> dict:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    model = TinyModel(TinyConfig(context=256))
    loss = warm_up(model, steps=args.warm, seed=args.seed)
    print(f"warm-up: {args.warm} steps, loss {loss:.3f}", flush=True)
    sampler = await stack.enter_async_context(Sampler(TinyModel(model.config)))
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(ModelServer(sampler, renderer()).app, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    rollouts = await asyncio.to_thread(
        lambda: ry_train.RayRollouts(
            store=args.store, policy=POLICY.format(url=url), agent="shell-agent", parallel=8,
            ray=ry_train.RayOptions(address=args.address),
            max_staleness=STALENESS, verifier=answered, system_prompt=SYSTEM, max_calls=4,
            limits=Limits(agent=60, verify=30), model="tiny",
        )
    )  # fmt: skip
    learner, curve, began = Learner(model), [], time.monotonic()
    try:
        for step in range(args.steps):
            await sampler.load({k: v.clone() for k, v in model.state_dict().items()}, step)
            await asyncio.to_thread(rollouts.update, step)
            for prompt in range(args.prompts):
                question = task(args.seed * 1_000_003 + step * args.prompts + prompt)
                await asyncio.to_thread(rollouts.submit, question, size=GROUP, seed=step)
            rows, rewards, without = await groups(rollouts, args.prompts * GROUP)
            gap = learner.gap(rows) if rows else None
            if rows:
                await asyncio.to_thread(learner.step, rows)
            mean = sum(rewards) / len(rewards) if rewards else None
            curve.append({"step": step, "reward": mean, "rollouts": len(rewards), "without": without, "gap": gap})
            print(f"step {step:3d}  reward {mean}  rows {len(rows)}  {time.monotonic() - began:.0f} s", flush=True)
    finally:
        await asyncio.to_thread(rollouts.close)
        server.should_exit = True
        await serving
    return {"seed": args.seed, "curve": curve}


async def main(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        result = await train(args, stack)
    (args.out / "curve.json").write_text(json.dumps(result, indent=1))
    print(f"written to {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=WARM)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--address", default="", help="a Ray cluster; left out, two nodes are started here")
    parser.add_argument("--store", default="", help="a store that every node reaches")
    parser.add_argument("--out", type=Path, default=Path("out/grpo-ray"))
    options = parser.parse_args()
    if options.address:
        asyncio.run(main(options))
    else:
        # the nodes import the example
        os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        database = PostgresServer() if not options.store else None
        options.store = options.store or database.url
        try:
            with RayCluster(2) as cluster:
                options.address = cluster.address
                asyncio.run(main(options))
        finally:
            if database is not None:
                database.close()
