"""The little world of the training example: six files with one digit each, a question, and a language of shell lines.

The model speaks bytes. A line that starts with `$` is a shell command, anything else ends the conversation. To answer "what is in
c?" it must `$cat c`, read the digit, and `$echo 7 >x`. The verifier looks at the file `x`; nothing else can give a reward.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import msgspec

import rollyard as ry
from rollyard.core.message import Message, ToolSpec
from rollyard.core.task import File, Task
from rollyard.policy.parsers.protocol import assemble
from rollyard.policy.renderers.bytelevel import ASSISTANT, END, TOOL, USER, ByteRenderer
from rollyard.policy.renderers.bytelevel import SYSTEM as SYSTEM_ROLE

NAMES = "abcdef"
ANSWER = "x"  # none of the names: a file that is asked for holds its answer before the agent has done anything
SYSTEM = "q"


class ShellLines:
    """A parser for a model of a million weights: `$command` calls the shell."""

    name = "shell-lines"
    think = ("", "")

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        if text.startswith("$"):
            return assemble(None, "", [("shell", msgspec.json.encode({"command": text[1:]}).decode())])
        return assemble(None, text or ".", [])

    def format(self, message: Message) -> str:
        for call in message.tool_calls:
            return "$" + msgspec.json.decode(call.arguments).get("command", "")
        return message.text


def renderer() -> ByteRenderer:
    return ByteRenderer(parser=ShellLines(), tools="omit")


@ry.verifier(grade="shared")
async def answered(sandbox, rollout):
    """1 when the answer file holds the digit that was asked for."""
    wanted = rollout.task.metadata["answer"]
    found = (await sandbox.exec(f"cat {ANSWER} 2>/dev/null", cwd="/workspace", timeout=10)).stdout.decode().strip()
    return ry.Verdict(reward=float(found == wanted), checks={"answer": found == wanted})


def task(seed: int) -> Task:
    draw = random.Random(seed)
    digits = {name: str(draw.randrange(10)) for name in NAMES}
    wanted = draw.choice(NAMES)
    return Task(
        id=f"q{seed}",
        instruction=f"{wanted}?",
        files=tuple(File(path=name, data=f"{digit}\n".encode()) for name, digit in digits.items()),
        metadata={"answer": digits[wanted], "asked": wanted},
    )


def demonstration(draw: random.Random, skill: float) -> tuple[array[int], bytes]:
    """One conversation of a noisy demonstrator as ids and a mask over what it said. At each step it is right with
    probability `skill`, else it names a random file or digit."""
    digits = {name: str(draw.randrange(10)) for name in NAMES}
    wanted = draw.choice(NAMES)
    looked = wanted if draw.random() < skill else draw.choice(NAMES)
    said = digits[looked] if draw.random() < skill else str(draw.randrange(10))
    ids, mask = array("i"), bytearray()

    def put(role: int, text: str, train: bool) -> None:
        ids.append(role)
        mask.append(0)
        body = [*text.encode(), END]
        ids.extend(body)
        mask.extend([int(train)] * len(body))

    put(SYSTEM_ROLE, SYSTEM, False)
    put(USER, f"{wanted}?", False)
    put(ASSISTANT, f"$cat {looked}", True)
    put(TOOL, f"{digits[looked]}\n", False)
    put(ASSISTANT, f"$echo {said} >{ANSWER}", True)
    put(TOOL, "", False)
    put(ASSISTANT, ".", True)
    return ids, bytes(mask)
