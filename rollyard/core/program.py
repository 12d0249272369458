"""One program to run in a sandbox, as a value, and the calls users write over it.

A backend runs a `Program`; `ProgramCalls` gives it `exec` and `start` with keyword arguments, written here once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Required, Self, TypedDict, Unpack, overload

import msgspec

from rollyard.core.errors import ConfigError, PathError

if TYPE_CHECKING:
    from rollyard.core.egress import Egress
    from rollyard.core.protocols import Job
    from rollyard.core.sandbox import Exit

Command = str | Sequence[str]
MAX_OUTPUT = 16 * 2**20


class ExecOptions(TypedDict, total=False):
    """What `exec` takes beside the command. `max_output` bounds each of stdout and stderr."""

    env: Mapping[str, str] | None
    cwd: str | None
    user: str | None
    stdin: bytes | None
    timeout: Required[float]
    max_output: int


class StartOptions(TypedDict, total=False):
    """What `start` takes beside the command. With `stdin=True` the program reads what `Job.write` sends."""

    env: Mapping[str, str] | None
    cwd: str | None
    user: str | None
    stdin: bool
    job_id: str | None


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """`None` is the sandbox's own default. `stdin` is given whole as bytes, kept open (True) for a job, or empty (False).
    `timeout` and `max_output` are for programs that are waited for, `job_id` is for jobs."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    stdin: bytes | bool = False
    timeout: float | None = None
    max_output: int | None = None
    job_id: str | None = None

    def __post_init__(self) -> None:
        if not self.argv or any("\0" in part for part in self.argv):
            name = self.argv[0] if self.argv else ""
            raise PathError(name, "EINVAL", hint="a command needs a program, and no NUL in its arguments")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise PathError(name, "EINVAL", hint="this environment variable cannot be passed to a program")
        if self.job_id is not None:
            check_job_id(self.job_id)

    @classmethod
    def of(cls, command: Command, **fields: Any) -> Self:
        """A string is a line for `/bin/sh -c`; a sequence is executed as it is. A field that is None keeps its default."""
        argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(str(part) for part in command)
        return cls(argv=argv, **{name: value for name, value in fields.items() if value is not None})

    @property
    def input(self) -> bytes | None:
        """The whole content of its stdin, where that is known before it starts."""
        return self.stdin if isinstance(self.stdin, bytes) else None

    @property
    def output_limit(self) -> int:
        return MAX_OUTPUT if self.max_output is None else self.max_output

    def with_defaults(self, *, env: Mapping[str, str], cwd: str | None = None, user: str | None = None) -> Self:
        """The same program with these values where it names none of its own."""
        fields = {"env": {**env, **self.env}, "cwd": self.cwd or cwd, "user": self.user or user}
        return msgspec.structs.replace(self, **fields)


def check_job_id(job_id: str) -> str:
    if "/" in job_id or job_id.startswith(".") or not job_id:
        raise PathError(job_id, "EINVAL", hint="a job id is a plain name")
    return job_id


class ProgramCalls:
    """`exec` and `start` for a sandbox that can run a `Program`."""

    egress: Egress | None = None  # the rules of a sandbox that may reach some hosts

    async def _exec(self, program: Program, timeout: float) -> Exit:
        """Run a program to its end, for at most `timeout` seconds."""
        raise NotImplementedError

    async def _start(self, program: Program) -> Job:
        """Start a program in the background; the job of that id, and nothing started, when it ran here before."""
        raise NotImplementedError

    @overload
    async def exec(self, program: Program, /) -> Exit: ...
    @overload
    async def exec(self, program: Command, /, **options: Unpack[ExecOptions]) -> Exit: ...
    async def exec(self, program: Program | Command, /, **options: Any) -> Exit:
        """Run a program and wait for it."""
        wanted = _as_program("exec", program, options)
        if wanted.timeout is None:
            raise TypeError("exec needs a timeout in seconds: exec(command, timeout=60)")
        if wanted.stdin is True or wanted.job_id is not None:
            raise ConfigError("exec takes stdin as bytes and no job_id", hint="start a job with start(...)")
        return await self._exec(wanted, wanted.timeout)

    @overload
    async def start(self, program: Program, /) -> Job: ...
    @overload
    async def start(self, program: Command, /, **options: Unpack[StartOptions]) -> Job: ...
    async def start(self, program: Program | Command, /, **options: Any) -> Job:
        """Start a program in the background. With a `job_id` that ran here before, the job of that name is returned and
        nothing is started."""
        wanted = _as_program("start", program, options)
        if wanted.input is not None or wanted.timeout is not None or wanted.max_output is not None:
            raise ConfigError(
                "start takes stdin=True or False, and no timeout or max_output",
                hint="give input with Job.write, and the timeout to Job.wait",
            )
        return await self._start(wanted)


def _as_program(call: str, program: Program | Command, options: Mapping[str, Any]) -> Program:
    if isinstance(program, Program):
        if options:
            raise TypeError(f"{call} of a Program takes no more options: {', '.join(options)} belong into the Program")
        return program
    return Program.of(program, **options)
