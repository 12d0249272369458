"""The tasks: small chores in a shell, generated without end, and a demonstrator who often gets them wrong.

Five kinds: write a number, count lines, copy a file, keep a last line, and follow a note that names the file to write, which
takes a look first. The verifier reads one file after the agent is dead. The files of training and of held-out chores have no
name in common.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

import rollyard as ry
from rollyard.core.call import ids as to_ids
from rollyard.core.message import Message, Text, ToolCall, ToolResult
from rollyard.core.task import File, Task
from rollyard.policy.renderers.protocol import Renderer, SampledTurn

SYSTEM = """Use the shell. To run a command, say
<tool_call>
{"name": "shell", "arguments": {"command": "ls"}}
</tool_call>
When the work is done, say done."""
KINDS = ("write", "count", "copy", "last", "note")
WORDS = {
    "train": "apple bridge candle desert engine forest garden hammer island jacket kitchen ladder market needle orange pencil "
    "quarter river silver table umbrella valley window yellow basket camera dinner eagle feather guitar honey iron "
    "jungle kettle lemon mirror number office paper queen rabbit school tiger uncle village winter anchor butter "
    "copper dragon",
    "held-out": "autumn bottle castle doctor evening finger glass harbor insect journey king letter mountain night ocean "
    "pocket rocket summer temple violin",
}
Split = Literal["train", "held-out"]


class Chore(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    source: str
    target: str  # the file that is looked at
    number: str
    lines: tuple[str, ...]

    @property
    def instruction(self) -> str:
        return {
            "write": f"Write the number {self.number} to the file {self.target}.",
            "count": f"Count the lines of {self.source} and write how many to {self.target}.",
            "copy": f"Copy the file {self.source} to {self.target}.",
            "last": f"Write the last line of {self.source} to {self.target}.",
            "note": f"The file {self.source} names another file. Write the number {self.number} to that file.",
        }[self.kind]

    @property
    def wanted(self) -> str:
        """What the target must hold."""
        return {
            "write": self.number,
            "count": str(len(self.lines)),
            "copy": "\n".join(self.lines),
            "last": self.lines[-1],
            "note": self.number,
        }[self.kind]


def chore(draw: random.Random, split: Split) -> Chore:
    kind = draw.choice(KINDS)
    source, target = (f"{word}.txt" for word in draw.sample(WORDS[split].split(), 2))
    lines = tuple(str(draw.randrange(100, 1000)) for _ in range(draw.randrange(2, 7)))
    if kind == "note":
        lines = (target,)
    return Chore(kind=kind, source=source, target=target, number=str(draw.randrange(100, 1000)), lines=lines)


def task(seed: int, split: Split) -> Task:
    """Seeds of the two splits give different chores even where they are equal numbers."""
    made = chore(random.Random(f"{split}-{seed}"), split)
    return Task(
        id=f"{split}-{seed}",
        instruction=made.instruction,
        files=(File(path=made.source, data="".join(f"{line}\n" for line in made.lines).encode()),),
        metadata={"kind": made.kind, "target": made.target, "wanted": made.wanted},
    )


@ry.verifier(grade="shared")
async def is_done(sandbox, rollout):
    """1 when the target holds what was wanted."""
    facts = rollout.task.metadata
    found = (await sandbox.exec(["cat", facts["target"]], cwd="/workspace", timeout=20)).stdout.decode(errors="replace")
    right = found.strip() == facts["wanted"]
    return ry.Verdict(reward=float(right), checks={facts["kind"]: right})


def command(made: Chore, kind: str) -> str:
    """What does a chore of this kind; for a note, once it was read."""
    return {
        "write": f"echo {made.number} > {made.target}",
        "count": f"wc -l < {made.source} > {made.target}",
        "copy": f"cp {made.source} {made.target}",
        "last": f"tail -n 1 {made.source} > {made.target}",
        "note": f"echo {made.number} > {made.target}",
    }[kind]


def blunder(draw: random.Random, made: Chore) -> str:
    """A plausible command that does something else."""
    other = f"{draw.choice(WORDS['train'].split())}.txt"
    wrong = (
        command(made, draw.choice([kind for kind in ("write", "count", "copy", "last") if kind != made.kind])),
        command(msgspec.structs.replace(made, target=other), made.kind),
        command(msgspec.structs.replace(made, source=made.target, target=made.source), made.kind),
        f"cat {made.source}",
    )
    return draw.choice(wrong)


def turns(draw: random.Random, made: Chore, skill: float) -> list[tuple[str, str]]:
    """Commands of a demonstrator who is right with probability `skill` at each of them, and what the shell would print."""
    said: list[tuple[str, str]] = []
    if made.kind == "note":
        if draw.random() >= skill:
            return [(f"echo {made.number} > {made.source}", "")]
        said.append((f"cat {made.source}", f"{made.target}\n"))
    right = draw.random() < skill
    run = command(made, made.kind) if right else blunder(draw, made)
    return [*said, (run, "".join(f"{line}\n" for line in made.lines) if run.startswith("cat ") else "")]


class Writer(Renderer, Protocol):
    """A renderer that can also say a message in its model's own words."""

    def completion_of(self, message: Message) -> Sequence[int]: ...


def demonstration(draw: random.Random, renderer: Writer, skill: float) -> tuple[list[int], list[int]]:
    """One conversation of the demonstrator as the gate would make it: its ids, and 1 where the demonstrator speaks."""
    made = chore(draw, "train")
    prompt = (Message("system", (Text(SYSTEM),)), Message("user", (Text(made.instruction),)))
    ids = list(renderer.render(prompt))
    mask = [0] * len(ids)

    def say(message: Message) -> list[int]:
        said = list(renderer.completion_of(message))
        ids.extend(said)
        mask.extend([1] * len(said))
        return said

    for number, (run, printed) in enumerate(turns(draw, made, skill)):
        call = ToolCall(f"call_{number}", "shell", f'{{"command": {msgspec.json.encode(run).decode()}}}')
        begun, message = len(ids), Message("assistant", (call,))
        turn = SampledTurn(to_ids(ids), begun, to_ids(say(message)), message)
        result = Message("tool", (ToolResult(call.id, (Text(printed),)),))
        added = list(renderer.bridge(turn, (result,)).ids)
        ids.extend(added)
        mask.extend([0] * len(added))
    say(Message("assistant", (Text("done"),)))
    return ids, mask
