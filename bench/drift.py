"""How many turns of real agents a plain re-render would have broken, and how many the bridge kept.

    python -m bench.drift [AGENT ...] [--turns 10]

Each agent runs for real in a local sandbox, through the gate. A scripted model answers in the tokens of the SmolLM2
vocabulary with a tool template: odd white space, reasoning, single and parallel tool calls. For every turn after the first
the prompt is built twice: from the sampled ids (bridge) and by rendering what the agent sent back. Where the two differ, a
trainer that re-rendered would have trained on tokens that were never sampled. Two models speak: one always samples the
tokens that its tokenizer would choose (then only the agent can break a turn), one samples some words in smaller pieces, as
real models do. A third run asks for commands that agents edit before they send them back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import rollyard as ry
from rollyard.core.call import ids
from rollyard.core.message import Message, Text
from rollyard.policy.prompts import Prompts
from tests.servers.smollm import weights

AGENTS = ("codex", "claude-code", "pi", "goose", "gemini-cli", "mini-swe-agent", "qwen-code", "opencode", "shell-agent")
TEMPLATE = Path(__file__).parents[1] / "tests/policy/models/tools.jinja"


# Commands that agents send back in other words: a `cd` to where they are already, white space around and between, escapes
# that JSON may spell in two ways, nothing at all.
CWD = "/workspace"
EDITED = (
    "cd {cwd} && echo moved {n}",
    "echo trailing {n}\n\n",
    "  echo   leading {n}",
    "echo 'quotes \"{n}\" \\u00e9 é \t tab / slash'",
    "cd {cwd}; echo semicolon {n}",
    "\ncd {cwd} && \\\n  echo continued {n}\n",
    'bash -c "echo nested {n}"',
    "timeout 5 echo limited {n}",
    "true",
)


def edited_steps(turns: int, cwd: str) -> list[dict]:
    """`turns` answers whose commands agents like to edit; the last is text."""
    commands = [EDITED[n % len(EDITED)].replace("{cwd}", cwd).replace("{n}", str(n)) for n in range(turns - 1)]
    return [*({"shell": command, "text": f"step {n}"} for n, command in enumerate(commands)), {"text": "done"}]


def steps(turns: int) -> list[dict]:
    """`turns` answers: every third with two calls at once, the others with one; the last is text."""
    out: list[dict] = []
    for n in range(turns - 1):
        one = {"shell": f"echo  turn {n}"}
        step = {"parallel": [one, {"shell": f"echo 'again {n}'"}]} if n % 3 == 2 else one
        step |= {"text": f"Now  step {n}: \n\n", "thinking": f"  first I think,\n\tthen I do {n}  "}
        out.append(step)
    return [*out, {"text": "done"}]


class Pieces:
    """The same renderer for a model that samples every fourth word in single characters."""

    def __init__(self, inner) -> None:
        self.name, self.stop_ids = inner.name, inner.stop_ids
        self.render, self.bridge, self.parse, self.decode = inner.render, inner.bridge, inner.parse, inner.decode
        self._inner = inner

    def completion_of(self, message):
        out = ids()
        for n, token in enumerate(self._inner.completion_of(message)):
            text = self.decode(ids([token]))
            if n % 4 or token in self.stop_ids or not text.isascii():
                out.append(token)
            else:
                out.extend(t for c in text for t in self._inner.completion_of(Message("assistant", (Text(c),)))[:-1])
        return out


async def measure_agent(agent: str, turns: int) -> dict:
    canonical = ry.policy.renderer(weights(), template=TEMPLATE.read_text(), parser="hermes")
    row = {"agent": agent}
    plain, edited = steps(turns), edited_steps(turns, CWD)
    for name, renderer, said in (
        ("canonical", canonical, plain),
        ("pieces", Pieces(canonical), plain),
        ("edited", canonical, edited),
    ):
        policy = ry.policy.scripted(said, renderer=renderer, check="always")
        done = await ry.run_rollout("Do what the model says.", agent=agent, policy=policy, limits=ry.Limits(agent=240))
        row |= {
            "version": done.agent_version,
            name: {
                "status": done.status,
                "error": done.error,
                "rows": len(done.trajectory.branches),
                **summary(policy.prompts),
            },
        }
    return row


def summary(prompts: Prompts) -> dict:
    counts = prompts.counts
    reasons = {name: count for name, count in counts.items() if name.startswith(("render:", "unproven:"))}
    rendered = sum(count for name, count in reasons.items() if name.startswith("render:"))
    return {
        "calls": counts["bridge"] + counts["bridged_by_id"] + rendered,
        "bridged": counts["bridge"] + counts["bridged_by_id"],
        "by_id": counts["bridged_by_id"],
        "broken_by_rerender": counts["check:differs"],
        "reasons": reasons,
    }


def table(rows: list[dict]) -> str:
    lines = [
        "| agent | version | calls | kept by the bridge | broken by a re-render | the same, sampled in pieces | "
        "edited commands: kept (by id) | rows | other prompts |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one, two, three = row["canonical"], row["pieces"], row["edited"]
        why = ", ".join(f"{name.removeprefix('render:')} {count}" for name, count in one["reasons"].items())
        lines.append(
            f"| {row['agent']} | {row['version'] or ''} | {one['calls']} | {one['bridged']} | {one['broken_by_rerender']} | "
            f"{two['broken_by_rerender']} of {two['bridged']} | {three['bridged']} ({three['by_id']}) | {three['rows']} | {why} |"
        )
    return "\n".join(lines)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", default=AGENTS)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for agent in options.agents:
        rows.append(await measure_agent(agent, options.turns))
        print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        print(table(rows))


if __name__ == "__main__":
    asyncio.run(main())
