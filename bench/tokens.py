"""What exact prompts cost: CPU per turn of the bridge, against a full render of the same conversation, as it grows.

    python -m bench.tokens [--turns 200] [--chars 1500]

Real parts: the SmolLM2 vocabulary and template, agent turns with a tool result of `--chars` characters. The claim is that a
bridge costs the same at turn 200 as at turn 10 (what is new is rendered; the rest is copied), while a render grows with the
history. Ratios are what counts; milliseconds depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from msgspec.structs import replace

import rollyard as ry
from bench.figures import note
from rollyard.core.call import Call, Reply, floats
from rollyard.core.message import Message, Text, tools_digest
from rollyard.policy.prompts import Prompts
from rollyard.trajectory.trajectory import Trajectory
from tests.servers.smollm import weights

WORDS = (
    "the",
    "file",
    "src/main.py",
    "line",
    "42",
    "error:",
    "undefined",
    "name;",
    "def",
    "run(self,",
    "value):",
    "return",
    "+ 1\n",
)


def text(rng: random.Random, chars: int) -> str:
    out: list[str] = []
    size = 0
    while size < chars:
        out.append(rng.choice(WORDS))
        size += len(out[-1]) + 1
    return " ".join(out)


def cpu_ms(function, *args):
    started = time.process_time()
    value = function(*args)
    return value, (time.process_time() - started) * 1000


def measure(turns: int, chars: int) -> dict:
    rng = random.Random(0)
    renderer = ry.policy.renderer(weights())
    prompts = Prompts(renderer)
    trajectory = Trajectory("r")

    def prepare(call: Call) -> Call:
        found = trajectory.match(call)
        return prompts.prepare(replace(call, continues=found.continues, fork_reason=found.reason))

    messages = [Message("system", (Text(text(rng, 4000)),)), Message("user", (Text("go"),))]
    bridge, render, sizes = [], [], []
    for turn in range(turns):
        call = Call(
            id=f"c{turn}",
            rollout_id="r",
            dialect="chat",
            model="m",
            messages=tuple(messages),
            tools_digest=tools_digest(()),
        )
        prepared, spent = cpu_ms(prepare, call)
        bridge.append(spent)
        sizes.append(len(prepared.prompt_ids))
        render.append(cpu_ms(renderer.render, messages)[1] if turn % 10 == 9 else None)
        answer = Message("assistant", (Text(text(rng, 120)),))
        sampled = renderer.completion_of(answer)
        reply = Reply(
            message=answer,
            prompt_ids=prepared.prompt_ids,
            completion_ids=sampled,
            logprobs=floats([-0.1] * len(sampled)),
        )
        bridge[-1] += cpu_ms(trajectory.add, call, reply)[1]
        messages += [answer, Message("user", (Text(text(rng, chars)),))]
    assert prompts.counts["bridge"] == turns - 1
    return {"bridge": bridge, "render": render, "tokens": sizes}


def window(values: list, around: int) -> float:
    near = [v for v in values[max(1, around - 10) : around] if v is not None]
    return statistics.median(near)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--chars", type=int, default=1500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.turns, options.chars)
    rows = []
    for turn in sorted({20, 50, 100, options.turns}):
        if turn <= options.turns:
            rows.append(
                {
                    "turn": turn,
                    "prompt_tokens": found["tokens"][turn - 1],
                    "bridge_ms": round(window(found["bridge"], turn), 3),
                    "render_ms": round(window(found["render"], turn), 3),
                }
            )
    flat = rows[-1]["bridge_ms"] / rows[0]["bridge_ms"]
    if options.json:
        print(json.dumps({"rows": rows, "bridge_last_over_first": round(flat, 2)}))
        return
    for row in rows:
        ratio = row["render_ms"] / row["bridge_ms"]
        print(
            f"turn {row['turn']:4d}  {row['prompt_tokens']:7d} tokens  bridge {row['bridge_ms']:7.3f} ms  "
            f"render {row['render_ms']:8.3f} ms  render/bridge {ratio:6.1f}"
        )
    note(f"bridge at turn {rows[-1]['turn']} / turn {rows[0]['turn']}", flat)


if __name__ == "__main__":
    main()
