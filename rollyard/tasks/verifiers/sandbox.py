"""A sandbox as a verifier sees it: the same sandbox, with clean defaults for every program it starts.

A program's environment comes from the pristine image and the host, never from files the agent could write. What is left are the
places programs look by themselves: HOME is new and empty, and so is Python's user site, which a test script may fill; git runs no
hooks; with tools of its own the verifier's PATH starts with them. For what programs find in the agent's files see
`planted.py`. A task's `[verifier.env]` is applied last and may say otherwise, as a test that inspects the agent's home has
to.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from rollyard.core.program import Program
from rollyard.core.protocols import Job, Sandbox
from rollyard.core.rollout import CommandRecord
from rollyard.core.sandbox import DEFAULT_PATH, Exit
from rollyard.core.sandbox_wrapper import SandboxWrapper

TESTS = "/tests"
LOGS = "/logs/verifier"
HOME = "/logs/verifier-home"
SAFE_PATH = f"{HOME}/.safe-path"  # Python's own modules before the agent's; see `inside/safe_path.py`

_GIT = {"core.hooksPath": "/dev/null", "core.fsmonitor": "false", "core.pager": "cat", "safe.directory": "*"}

CLEAN: Mapping[str, str] = {
    "HOME": HOME,
    "PYTHONUSERBASE": f"{HOME}/.local",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_CONFIG_COUNT": str(len(_GIT)),
    **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(_GIT)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_GIT.values())},
}


def clean_env(
    image: Mapping[str, str], tools: tuple[str, ...], extra: Mapping[str, str], *, safe_path: bool = True
) -> dict[str, str]:
    """`image` is the pristine image's own environment; `tools` are the bin directories of the verifier's layers."""
    path = {"PATH": ":".join((*tools, image.get("PATH") or DEFAULT_PATH))} if tools else {}
    env = {**CLEAN, **path, **extra}
    if safe_path:
        said = env.get("PYTHONPATH") or image.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{SAFE_PATH}:{said}" if said else SAFE_PATH
    return env


class VerifierSandbox(SandboxWrapper):
    """Delegates to the sandbox; `exec` and `start` get the defaults that were not given. `record` is called with each command
    that ended or was cut off, when it was."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        env: Mapping[str, str],
        cwd: str,
        user: str | None,
        record: Callable[[CommandRecord], None] | None = None,
    ) -> None:
        super().__init__(sandbox)
        self.env, self.cwd, self.user, self._record = env, cwd, user, record

    async def _exec(self, program: Program, timeout: float) -> Exit:
        try:
            done = await self.sandbox.exec(self._with_defaults(program))
        except BaseException:  # cut off by a deadline or broken: that it ran is known all the same
            self._note(program, Exit(exit_code=None, timed_out=True))
            raise
        self._note(program, done)
        return done

    def _note(self, program: Program, done: Exit) -> None:
        if self._record is not None:
            shell = program.argv[:2] == ("/bin/sh", "-c") and len(program.argv) == 3
            self._record(CommandRecord.of(program.argv[2] if shell else shlex.join(program.argv), done))

    async def _start(self, program: Program) -> Job:
        return await self.sandbox.start(self._with_defaults(program))

    def _with_defaults(self, program: Program) -> Program:
        return program.with_defaults(env=self.env, cwd=self.cwd, user=self.user)

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        await self.sandbox.write(path, data, mode=mode, user=user or self.user)

    async def upload_dir(self, source: str, path: str, *, user: str | None = None) -> None:
        await self.sandbox.upload_dir(source, path, user=user or self.user)
