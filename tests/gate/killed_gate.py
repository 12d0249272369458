"""A program with a gate whose sessions have policies, tools and a secret of their own; it prints their keys and waits."""

from __future__ import annotations

import asyncio
import json
import sys

from rollyard import policy
from rollyard.gate import Gate
from rollyard.store import Store
from rollyard.tools import Toolset, tool


@tool
async def press(button: str) -> str:
    """Press a button."""
    return f"pressed {button}"


@tool(name="press")
async def press_twice(button: str, times: int) -> str:
    """Press a button some times."""
    return f"pressed {button} {times} times"


async def main(store: str, script: str) -> None:
    async with Store.open(store) as log, Gate(policy.scripted(["the gate's own"]), log=log, host="127.0.0.1") as gate:
        opened = {
            "plain": await gate.open_session("plain"),
            "text": await gate.open_session("text", policy=policy.parse(f"scripted:{script}")),
            "python": await gate.open_session("python", policy=policy.scripted(lambda call: "own code")),
            "tools": await gate.open_session("tools", tools=Toolset([press])),
            "secret": await gate.open_session("secret", settings={"api_key": "sk-own", "model": "m"}),
        }
        print(json.dumps({name: session.key for name, session in opened.items()}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
