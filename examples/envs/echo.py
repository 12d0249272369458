"""The smallest environment: it says back what it is told. `rollyard serve env examples/envs/echo.py:EchoEnv --port 8000`"""

from __future__ import annotations

import msgspec

import rollyard as ry


class Say(msgspec.Struct):
    message: str


class EchoEnv(ry.Env):
    action = Say

    def __init__(self):
        self.said = []

    async def reset(self, *, seed=None, options=None):
        self.said = []
        return ry.StepResult(observation={"message": "ready"})

    async def step(self, action: Say):
        self.said.append(action.message)
        return ry.StepResult(observation={"message": action.message}, reward=float(len(action.message)))

    @property
    def state(self):
        return {"said": len(self.said)}

    def tools(self):
        @ry.tools.tool
        async def echo(message: str) -> str:
            """Say it back."""
            return message

        return [echo]
