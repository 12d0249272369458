"""Remote task environments with everything chosen: Fleet as the provider, a local sandbox for verifier code, leased browsers.

`rollyard.TaskEnv(config)` is `envs.task_env.TaskEnv` with these defaults. Choosing does no I/O; what is missing (a key, a
credential, an env key) is an error here and not in the middle of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rollyard.core.protocols import Backend
from rollyard.core.remote_task import TaskConfig
from rollyard.envs.browser.client import BrowserLeases
from rollyard.envs.fleet.databases import Databases
from rollyard.envs.fleet.provider import EnvProvider
from rollyard.envs.fleet.remote_episode import Judge
from rollyard.envs.fleet.sdk import FleetProvider
from rollyard.envs.fleet.task_env import RemoteTaskEnv as BareTaskEnv
from rollyard.envs.fleet.task_env import TaskLimits
from rollyard.envs.fleet.task_instance import Leases
from rollyard.envs.fleet.verifier_code import TIMEOUT_S, Checked, VerifierCode, run_check
from rollyard.sandbox import backend


class TaskEnv(BareTaskEnv):
    """`config` is a mapping (a task's JSON) or a `TaskConfig`; only `env_key` is required in it.

    `api_key` and `base_url` are Fleet's, or `FLEET_API_KEY` and `FLEET_BASE_URL`; `provider` is another one instead. `sandbox` is
    where verifier code runs: a backend's name, or an entered one to share. `leases` lends browsers to `browser_use` tasks;
    without it `ROLLYARD_BROWSER_URL` and `ROLLYARD_BROWSER_KEY` say who does.
    """

    def __init__(
        self,
        config: TaskConfig | Mapping[str, Any],
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        provider: EnvProvider | None = None,
        sandbox: str | Backend = "local",
        leases: Leases | None = None,
        limits: TaskLimits | None = None,
        verify_s: float = TIMEOUT_S,
        partial_reward: bool = False,
    ) -> None:
        task = config if isinstance(config, TaskConfig) else TaskConfig.read(config)
        chosen = provider or FleetProvider(api_key, base_url)
        self._own = chosen if provider is None else None
        super().__init__(
            task,
            chosen,
            judge_in(sandbox, timeout_s=verify_s),
            leases=leases or (BrowserLeases() if task.task_modality == "browser_use" else None),
            limits=limits,
            partial_reward=partial_reward,
        )

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            if self._own is not None:
                await self._own.aclose()

    @classmethod
    def from_config(cls, config: TaskConfig | Mapping[str, Any], **options: Any) -> Self:
        return cls(config, **options)

    @classmethod
    def from_json_file(cls, path: Path | str, task_key: str | None = None, **options: Any) -> Self:
        """A file with one task, a list of tasks, or `{"tasks": [...]}`."""
        return cls(TaskConfig.from_json_file(path, task_key), **options)


def judge_in(sandbox: str | Backend, *, timeout_s: float = TIMEOUT_S) -> Judge:
    """Runs verifier code in a backend by name, opened for each check, or in one that is open already."""

    async def judge(check: VerifierCode, databases: Databases | None) -> Checked:
        if not isinstance(sandbox, str):
            return await run_check(sandbox, check, databases, timeout_s=timeout_s)
        async with backend(sandbox) as made:
            return await run_check(made, check, databases, timeout_s=timeout_s)

    return judge
