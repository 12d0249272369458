"""The socket between a sandbox and its host: a slow start is told as one, and can be tried again."""

from __future__ import annotations

import socket

import pytest

from rollyard.core.errors import SandboxInterrupted
from rollyard.sandbox.local.channel import Channel

pytestmark = pytest.mark.anyio


async def test_a_greeting_that_does_not_come_is_an_interruption_and_closing_after_it_cancels_nothing():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours, name="sandbox x")
    with theirs, pytest.raises(SandboxInterrupted, match="sandbox x was not ready"):
        try:
            await channel.greeting(0.01)
        finally:
            channel.close()
