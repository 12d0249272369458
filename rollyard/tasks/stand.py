"""A sandbox as a verifier sees it: the same sandbox, with clean defaults for every program it starts.

What an agent can leave behind to steer a judge's programs (a start-up file, a PATH entry, a preloaded library, a user-site
package, a git hook) reaches them through the environment, the home directory or the working directory. Here PATH is the
image's own with the verifier's tools first, HOME is new and empty, and the variables that load code are emptied or pointed
nowhere. A task's `[verifier.env]` is applied last and may say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rollyard.core.protocols import Command, Job, Sandbox
from rollyard.core.sandbox import Exit

TESTS = "/tests"
LOGS = "/logs/verifier"
HOME = "/logs/verifier-home"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_GIT = {"core.hooksPath": "/dev/null", "core.fsmonitor": "false", "core.pager": "cat", "safe.directory": "*"}

CLEAN: Mapping[str, str] = {
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": str(len(_GIT)),
    **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(_GIT)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_GIT.values())},
}
# empty means "not set" to the program that reads it
_EMPTIED = ("BASH_ENV", "ENV", "LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "NODE_OPTIONS", "PERL5LIB", "PERL5OPT")
_EMPTIED_PYTHON = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONPATH", "PYTHONSTARTUP", "RUBYOPT")


def clean_env(image: Mapping[str, str], tools: tuple[str, ...], extra: Mapping[str, str]) -> dict[str, str]:
    """`image` is the pristine image's own environment: what it sets on purpose stays, PATH included."""
    emptied = {name: "" for name in (*_EMPTIED, *_EMPTIED_PYTHON) if name not in image}
    path = ":".join((*tools, image.get("PATH") or DEFAULT_PATH))
    return {**emptied, **CLEAN, **{k: v for k, v in image.items() if k not in CLEAN}, "PATH": path, **extra}


class Stand:
    """Delegates to the sandbox; `exec` and `start` get the defaults that were not given."""

    def __init__(self, sandbox: Sandbox, *, env: Mapping[str, str], cwd: str, user: str | None) -> None:
        self.sandbox, self.env, self.cwd, self.user = sandbox, env, cwd, user

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sandbox, name)

    async def exec(
        self,
        cmd: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout: float,
        max_output: int = 16 * 2**20,
    ) -> Exit:
        return await self.sandbox.exec(
            cmd,
            env={**self.env, **(env or {})},
            cwd=cwd or self.cwd,
            user=user or self.user,
            stdin=stdin,
            timeout=timeout,
            max_output=max_output,
        )

    async def start(
        self,
        cmd: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        job_id: str | None = None,
    ) -> Job:
        return await self.sandbox.start(
            cmd,
            env={**self.env, **(env or {})},
            cwd=cwd or self.cwd,
            user=user or self.user,
            stdin=stdin,
            job_id=job_id,
        )

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        await self.sandbox.write(path, data, mode=mode, user=user or self.user)

    async def upload_dir(self, source: str, path: str, *, user: str | None = None) -> None:
        await self.sandbox.upload_dir(source, path, user=user or self.user)

    def as_sandbox(self) -> Sandbox:
        return cast("Sandbox", self)
