"""Starts the zygote and asks it for sandboxes. A zygote that was killed is replaced on the next open; the sandboxes it
made live on, because each holds its own control socket."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollyard.core.errors import SandboxError, SandboxGone, SandboxUnavailable
from rollyard.sandbox.local.channel import Channel, ChannelRefused
from rollyard.sandbox.local.journal import PACKAGES

_CODE = "import sys; sys.path.append(sys.argv.pop()); from rollyard.sandbox.local.inner.zygote import main; main()"
_START_S = 20.0


class Launcher:
    def __init__(self, log: Path) -> None:
        self._log = log
        self._channel: Channel | None = None
        self._starting = asyncio.Lock()

    async def launch(self, plan: dict[str, Any], fds: Sequence[int], timeout: float) -> tuple[dict[str, Any], int]:
        """The zygote's answer and a pidfd of the new sandbox's first process."""
        for last in (False, True):
            channel = await self._ensure()
            try:
                reply, handed = await channel.request("open", plan, fds=fds, timeout=timeout)
            except SandboxGone:
                if last:
                    raise SandboxUnavailable("the sandbox launcher ended while it was asked", hint=self._hint) from None
                continue
            except ChannelRefused as refused:
                raise SandboxUnavailable(
                    f"cannot make a sandbox: {refused.name} at {refused.path}", hint="see `rollyard doctor`"
                ) from None
            return reply, handed[0]
        raise AssertionError("unreachable")

    @property
    def _hint(self) -> str:
        return f"its log is {self._log}"

    async def _ensure(self) -> Channel:
        async with self._starting:
            if self._channel is not None and not self._channel.closed.is_set():
                return self._channel
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                await asyncio.to_thread(self._start, theirs.fileno())
            self._channel = Channel(ours, name="the sandbox launcher")
            return self._channel

    def _start(self, control: int) -> None:
        """The process started here forks the zygote and ends, so the zygote is nobody's child and may outlive us."""
        with self._log.open("ab") as log:
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _CODE, str(control), str(PACKAGES)],
                env={},
                cwd="/",
                pass_fds=(control,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                timeout=_START_S,
                check=True,
            )

    async def aclose(self, timeout: float = 10.0) -> None:
        """Wait until the zygote has tidied up after our sandboxes. It ends by itself, once none it must keep is left."""
        channel, self._channel = self._channel, None
        if channel is None or channel.closed.is_set():
            return
        try:
            await channel.request("settle", timeout=timeout)
        except SandboxError:  # it is gone or slow; the next start sweeps
            pass
        finally:
            channel.close()
