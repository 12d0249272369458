"""Shell scripts that look around in a sandbox, several in one program: to start one costs more than most of them do."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from rollyard.core.errors import VerifierError
from rollyard.core.protocols import Sandbox

_TIMEOUT_S = 120.0
_MAX_BYTES = 64 * 2**20


class LookScript(NamedTuple):
    """`text` is the body of a function, called with `words`."""

    text: str
    words: tuple[str, ...] = ()


async def run_looks(sandbox: Sandbox, what: str, scripts: Sequence[LookScript]) -> list[bytes | None]:
    """What each of them printed; None for those that the bound on output cut off. `what` is for the error."""
    mark = secrets.token_hex(16)
    parts = [f"look() {{\n{script.text}\n}}\nlook {shlex.join(script.words)}\nprintf %s {mark}\n" for script in scripts]
    done = await sandbox.exec(
        ["/bin/sh", "-c", "".join(parts), "look"],
        cwd="/",
        user="0" if sandbox.capabilities.users else None,
        env={"LC_ALL": "C"},
        timeout=_TIMEOUT_S,
        max_output=_MAX_BYTES,
    )
    *whole, rest = done.stdout.split(mark.encode())
    if not done.ok or (not done.truncated and (rest or len(whole) != len(scripts))):
        raise VerifierError(f"looking at {what} failed: {done.text.strip()[-400:]}")
    return [whole[number] if number < len(whole) else None for number in range(len(scripts))]


def need_all(printed: bytes | None, what: str) -> bytes:
    if printed is None:
        raise VerifierError(f"looking at {what} failed: there is more than {_MAX_BYTES} bytes to say about it")
    return printed
