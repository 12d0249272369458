"""Tree-GRPO beside flat groups: as many attempts from fewer sampled tokens.

    python examples/grpo/tree.py --seeds 5 --out out/grpo-tree

A flat group is nine attempts at a question. A tree has nine leaves too: three attempts, and two that branch off each at its
second model call, after it has looked into a file (`Tree(width=2, at=1)`). What a branch has from its parent is not sampled
again, and trains once; what lies between two branch points has the difference of their values as its advantage. Both begin with
the same warmed-up model and see the same questions. Written: `tree.json`, with rewards and sampled tokens of every step.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rollyard as ry
from examples.grpo.learn import WARM, Learner, warm_up
from examples.grpo.train import answer
from examples.grpo.world import SYSTEM, answered, renderer, task
from rollyard.runs import Tree
from rollyard.train.sampler import Sampler
from rollyard.train.tiny import TinyConfig, TinyModel
from rollyard.trajectory.samples import Sample, samples

GROUP, ROOTS, TREE = 9, 3, Tree(width=2, depth=1, at=1)
LAST = 10  # steps whose rewards are compared


async def collect(questions: Sequence[int], parts: dict[str, Any], *, tree: bool) -> dict[str, Any]:
    """One step's rollouts: their rows, their rewards and how many tokens were sampled for them."""
    shape = {"attempts": ROOTS, "tree": TREE} if tree else {"attempts": GROUP}
    rows: list[Sample] = []
    rewards: list[float] = []
    sampled = 0
    options = {"agent": "shell-agent", "system_prompt": SYSTEM, "verifier": answered, "max_calls": 4}
    async with ry.Run([task(number) for number in questions], **shape, **options, **parts) as run:
        async for done in run:
            sampled += done.usage.get("completion_tokens") or 0
            if done.reward is not None:
                rewards.append(done.reward)
                rows.extend(samples(done).rows)
    return {"rows": rows, "rewards": rewards, "sampled": sampled}


async def train(model: TinyModel, seed: int, args: argparse.Namespace, *, tree: bool) -> list[dict[str, Any]]:
    learner, curve = Learner(model, tree=True), []
    queue = ry.policy.Queue(renderer=renderer())
    with TemporaryDirectory() as folder:
        async with (
            Sampler(TinyModel(model.config)) as sampler,
            ry.sandbox.backend("local") as backend,
            ry.Store.open(Path(folder) / "runs.db") as store,
            ry.Gate(queue, log=store) as gate,
        ):
            answering = asyncio.create_task(answer(queue, sampler))
            parts = {"sandbox": backend, "gate": gate, "store": store, "parallel": args.parallel}
            for step in range(args.steps):
                await sampler.load({name: value.clone() for name, value in model.state_dict().items()}, step)
                first = seed * 1_000_003 + step * args.prompts
                got = await collect(range(first, first + args.prompts), parts, tree=tree)
                if got["rows"]:
                    await asyncio.to_thread(learner.step, got["rows"])
                mean = fmean(got["rewards"]) if got["rewards"] else None
                curve.append({"reward": mean, "rollouts": len(got["rewards"]), "sampled": got["sampled"]})
                print(f"{'tree' if tree else 'flat'} {step:3d}  reward {mean}  {got['sampled']} tokens", flush=True)
            await queue.aclose()
            await answering
    return curve


async def compare(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    began, model = time.monotonic(), TinyModel(TinyConfig(context=256))
    warm_up(model, steps=args.warm, seed=seed)
    flat = await train(copy.deepcopy(model), seed, args, tree=False)
    grown = await train(model, seed, args, tree=True)
    return {"seed": seed, "flat": flat, "tree": grown, "seconds": round(time.monotonic() - began, 1)}


def summarize(curve: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The mean reward of the last steps, and rollouts for a thousand sampled tokens."""
    rewards = [point["reward"] for point in curve if point["reward"] is not None]
    sampled = sum(point["sampled"] for point in curve)
    return fmean(rewards[-LAST:]), 1000 * sum(point["rollouts"] for point in curve) / sampled


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"| seed | reward of the last {LAST} steps: flat | tree | trajectories per 1,000 sampled tokens: flat | tree | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        (flat, few), (tree, many) = summarize(result["flat"]), summarize(result["tree"])
        lines.append(f"| {result['seed']} | {flat:.2f} | {tree:.2f} | {few:.1f} | {many:.1f} | {many / few:.2f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=WARM, help="supervised steps before")
    parser.add_argument("--prompts", type=int, default=4, help="questions a step")
    parser.add_argument("--parallel", type=int, default=8, help="rollouts at a time")
    parser.add_argument("--out", type=Path, default=Path("out/grpo-tree"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in range(args.seed, args.seed + args.seeds):
        results.append(asyncio.run(compare(seed, args)))
        (args.out / "tree.json").write_text(json.dumps(results, indent=1))
        print(table(results), flush=True)


if __name__ == "__main__":
    main()
