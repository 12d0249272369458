"""Atropos 0.4: an environment for its API server, which is HTTP alone and wants no import.

    python -m rollyard.train.plugins.atropos --api http://trainer:8000 --rollouts http://runner:8800 --tasks tasks.jsonl --group 8

It registers, and posts a group for each task in turn while the trainer's queue is short; the agents' model is that of
the server of rollouts (`--base-url`: the vLLM that the trainer updates).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import PolicyError
from rollyard.core.log import Log
from rollyard.net.http_client import HttpPool
from rollyard.train.plugins.served_rollouts import Generate, ServedRollouts

_ANSWER_S = 60.0
_LONGEST = 2**28
_WAIT_S = 2.0  # between two looks at a trainer that has enough, or has not started


class AtroposEnvironment:
    def __init__(
        self,
        api: str,
        rollouts: ServedRollouts,
        tasks: Sequence[Mapping[str, Any]],
        *,
        group_size: int,
        name: str = "rollyard",
        max_token_length: int = 32_768,
        generate: Generate | None = None,
    ) -> None:
        self._api, self._rollouts, self._tasks = api.rstrip("/"), rollouts, tasks
        self._size, self._name, self._longest, self._generate = group_size, name, max_token_length, generate
        self._pool = HttpPool(connect_s=10.0, idle_s=5.0, max_body=_LONGEST)
        self._log = Log("rollyard.train.atropos")

    async def run(self, groups: int | None = None) -> None:
        """`groups` posted, or for ever."""
        try:
            env_id = await self._register()
            tasks = itertools.cycle(self._tasks)
            posted = 0
            while groups is None or posted < groups:
                if await self._has_enough(env_id):
                    await asyncio.sleep(_WAIT_S)
                    continue
                posted += await self._post_group(next(tasks), env_id)
        finally:
            await self._pool.aclose()

    async def _register(self) -> int:
        """Its number, once a trainer has started."""
        body = {
            "max_token_length": self._longest,
            "desired_name": self._name,
            "weight": 1.0,
            "group_size": self._size,
        }
        while True:
            answer = await self._ask("POST", "/register-env", body)
            if answer.get("status") == "success":
                return int(answer["env_id"])
            self._log.info("atropos.waits", api=self._api, answer=str(answer.get("status")))
            await asyncio.sleep(_WAIT_S)

    async def _has_enough(self, env_id: int) -> bool:
        status = await self._ask("GET", "/status-env", {"env_id": env_id})
        return int(status["queue_size"]) > 4 * self._size

    async def _post_group(self, task: Mapping[str, Any], env_id: int) -> int:
        rows, left_out = await self._rollouts.rows(task, "atropos", attempts=self._size, generate=self._generate)
        if left_out:
            reasons = [one["reasons"] for one in left_out]
            self._log.warning("atropos.group_not_whole", task=str(task.get("id")), left_out=str(reasons))
        if not rows["tokens"]:
            return 0
        await self._ask("POST", "/scored_data", {**rows, "env_id": env_id})
        return 1

    async def _ask(self, method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        answer = await self._pool.exchange(method, self._api + path, msgspec.json.encode(body), headers, _ANSWER_S)
        if answer.status != 200:
            raise PolicyError(
                f"{self._api}{path} answered {answer.status}: {answer.body[:300].decode(errors='replace')}"
            )
        return msgspec.json.decode(answer.body)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts of a server as an environment of Atropos.")
    parser.add_argument("--api", required=True, help="the Atropos API server's URL")
    parser.add_argument("--rollouts", help="the server of rollouts; its key in ROLLYARD_ROLLOUTS_KEY")
    parser.add_argument("--tasks", required=True, type=Path, help="a JSON Lines file of tasks")
    parser.add_argument("--group", type=int, default=8, help="rollouts of one task")
    words = parser.parse_args()
    tasks = [msgspec.json.decode(line) for line in words.tasks.read_bytes().splitlines() if line.strip()]
    asyncio.run(AtroposEnvironment(words.api, ServedRollouts(words.rollouts), tasks, group_size=words.group).run())


if __name__ == "__main__":
    main()
