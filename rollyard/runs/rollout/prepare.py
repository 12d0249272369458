"""Before the agent starts: where it runs, its files, the task's files, healthcheck, and setup commands.

The order is fixed: files are written, the agent is made ready (retried where it is uploaded), the task's setup commands run
once each and are never retried, then the agent. The first setup command that fails ends the rollout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from rollyard.core.errors import AgentInstallFailed, CommandFailed, CommandTimeout, ConfigError
from rollyard.core.limits import Deadline
from rollyard.core.protocols import Sandbox
from rollyard.core.rollout import CommandRecord
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import File, Healthcheck
from rollyard.runs.rollout.record import Record
from rollyard.runs.rollout.stages import Stages

DEFAULT_WORKDIR = "/workspace"
HOME = "/home/rollout"  # made for the rollout and its user; images have none of this name
_AGENT_SETUP_TRIES, _AGENT_SETUP_PAUSE_S = 3, 1.0
_MARGIN_S = 0.5  # a command is ended this long before its stage is, so that what it printed is kept


class SandboxFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the sandbox says about itself, asked once."""

    workdir: str
    path: str
    uid: int

    @property
    def as_root(self) -> bool:
        return self.uid == 0


async def look_around(sandbox: Sandbox, spec: SandboxSpec, deadline: Deadline) -> SandboxFacts:
    """Working directory, PATH and uid as the agent will have them."""
    workdir = spec.workdir or (DEFAULT_WORKDIR if spec.image == "host" else None)
    if workdir is not None:
        await sandbox.mkdir(workdir, user=spec.user)
    script = 'pwd; printf "%s\\n" "$PATH"; id -u'
    done = await sandbox.exec(script, cwd=workdir, user=spec.user, timeout=max(1.0, deadline.left))
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if not done.ok or len(lines) < 3:
        raise CommandFailed(
            "the sandbox cannot run a shell",
            exit_code=done.exit_code,
            stdout=done.stdout.decode("utf-8", "replace"),
            stderr=done.stderr.decode("utf-8", "replace"),
            hint="the image needs /bin/sh, pwd and id",
        )
    return SandboxFacts(workdir=workdir or lines[0], path=lines[1], uid=int(lines[2]))


async def put_files(sandbox: Sandbox, files: Sequence[File], workdir: str, user: str | None) -> None:
    """Relative paths are below the working directory. A missing source is an error before anything is written."""
    for file in files:
        if file.data is None and (file.source is None or not Path(file.source).exists()):
            raise ConfigError(f"file for {file.path!r} has no data and no readable source ({file.source!r})")
    for file in files:
        path = file.path if file.path.startswith("/") else f"{workdir}/{file.path}"
        if file.data is not None:
            await sandbox.write(path, file.data, mode=file.mode, user=user)
            continue
        source = Path(file.source or "")
        if source.is_dir():
            await sandbox.upload_dir(str(source), path, user=user)
        else:
            data = await anyio.to_thread.run_sync(source.read_bytes)
            mode = file.mode if file.mode is not None else source.stat().st_mode & 0o777
            await sandbox.write(path, data, mode=mode, user=user)


async def put_skills(sandbox: Sandbox, skills: str, user: str | None, deadline: Deadline) -> None:
    """A task's skills, from their folder in the image to the two places in a home where agents look for them."""
    targets = " ".join(f"{HOME}/{name}/skills" for name in (".agents", ".claude"))
    script = f'for to in {targets}; do mkdir -p "$to" && cp -R "$0/." "$to/" || exit 1; done'
    done = await sandbox.exec(["/bin/sh", "-c", script, skills], user=user, timeout=max(1.0, deadline.left))
    if not done.ok:
        raise ConfigError(f"environment.skills_dir: {skills!r} cannot be copied: {done.text.strip()[-200:]}")


async def run_setup(
    sandbox: Sandbox, commands: Sequence[str], workdir: str, record: Record, stages: Stages, deadline: Deadline
) -> None:
    """Each command is recorded when it ends, also one that is cut off; the first that fails ends it."""
    for number, command in enumerate(commands):
        done = await sandbox.exec(command, cwd=workdir, timeout=max(0.1, deadline.left - _MARGIN_S))
        noted = CommandRecord.of(command, done)
        record.note_command(noted)
        await stages.tell("setup.command", number=number, **msgspec.to_builtins(noted))
        if not done.ok:
            raise _setup_failed(noted, deadline)


async def run_agent_setup(
    sandbox: Sandbox, commands: Sequence[str], record: Record, stages: Stages, deadline: Deadline
) -> None:
    """What the agent needs in its sandbox. Unlike the task's setup it is tried again: it fetches and unpacks, and a registry
    that was away for a moment is no reason to give up. Every try is recorded."""
    for command in commands:
        for tries in range(1, _AGENT_SETUP_TRIES + 1):
            done = await sandbox.exec(command, timeout=max(0.1, deadline.left - _MARGIN_S))
            noted = CommandRecord.of(command, done)
            record.note_install(noted)
            await stages.tell("agent_setup.command", tries=tries, **msgspec.to_builtins(noted))
            if done.ok:
                break
            if done.timed_out or tries == _AGENT_SETUP_TRIES:
                raise _agent_setup_failed(noted, deadline)
            await anyio.sleep(_AGENT_SETUP_PAUSE_S * tries)


def _agent_setup_failed(failed: CommandRecord, deadline: Deadline) -> AgentInstallFailed:
    late = f"ran past {deadline.name} ({deadline.limit_s:g} s)"
    how = late if failed.timed_out else f"exited with {failed.exit_code}, {_AGENT_SETUP_TRIES} times"
    return AgentInstallFailed(
        f"agent_setup command {failed.command!r} {how}: {(failed.stderr or failed.stdout)[-400:].strip()}",
        exit_code=failed.exit_code,
        stdout=failed.stdout,
        stderr=failed.stderr,
    )


def _setup_failed(failed: CommandRecord, deadline: Deadline) -> CommandFailed | CommandTimeout:
    said = (failed.stderr or failed.stdout)[-400:].strip()
    if failed.timed_out:
        late = f"ran past {deadline.name} ({deadline.limit_s:g} s)"
        return CommandTimeout(f"setup command {failed.command!r} {late}: {said}", hint=f"raise {deadline.name}")
    return CommandFailed(
        f"setup command {failed.command!r} exited with {failed.exit_code}: {said}",
        exit_code=failed.exit_code,
        stdout=failed.stdout,
        stderr=failed.stderr,
    )


async def wait_healthy(sandbox: Sandbox, check: Healthcheck, *, cwd: str, deadline: Deadline) -> None:
    """Docker's rules: failures inside the start period do not count; then `retries` in a row are too many."""
    started, failures = time.monotonic(), 0
    while True:
        limit = min(check.timeout_s, max(1.0, deadline.left))
        done = await sandbox.exec(check.command, cwd=cwd, timeout=limit)
        if done.ok:
            return
        starting = time.monotonic() - started < check.start_period_s
        failures += 0 if starting else 1
        if failures >= check.retries:
            raise CommandFailed(
                f"healthcheck {check.command!r} failed {failures} times: {done.text[-400:].strip()}",
                exit_code=done.exit_code,
                stdout=done.stdout.decode("utf-8", "replace"),
                stderr=done.stderr.decode("utf-8", "replace"),
            )
        await anyio.sleep(check.start_interval_s if starting else check.interval_s)
