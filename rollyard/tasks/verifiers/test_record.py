"""Tests run in a judge's sandbox, and a record of how they ended that the code under test did not write.

`inside/run_tests.py` runs them and signs the record with a key that it is given on its input: a record that was written or
changed by another program is none. Code that runs as the same user could read the key out of that process's memory; see
docs/threat-model.md.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.resources
import secrets
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import PathError
from rollyard.core.protocols import Sandbox
from rollyard.core.sandbox import Exit
from rollyard.tasks.verifiers.run_once import retry_dropped
from rollyard.tasks.verifiers.sandbox import HOME, LOGS

_FOLDER = f"{HOME}/.tests"
WITNESS = f"{_FOLDER}/witness.py"  # what a plan may start in place of pytest
LOG = f"{LOGS}/tests.log"
_RECORD = f"{LOGS}/record.json"
_FILES = ("run_tests.py", "pytest_witness.py")
_MOST = 128 * 2**20


class TestPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """See `inside/run_tests.py`."""

    command: str | list[str]
    prepare: str = ""
    site: str = ""
    witness: str = ""
    control: dict[str, str] | None = None
    echo: bool = False


class RecordedTest(msgspec.Struct, frozen=True, array_like=True):
    id: str
    when: str
    outcome: str
    expected_to_fail: bool
    shown: str  # its name in pytest's summary


class TestRecord(msgspec.Struct, frozen=True, kw_only=True):
    prepared: bool
    starts: int
    ends: int
    strange: int
    controls: list[str]
    tests: list[RecordedTest]
    control: str | None
    exit: int | None = None
    sha256: str = ""
    size: int = 0

    @property
    def doubt(self) -> str | None:
        """Why what pytest said cannot be believed."""
        if not self.starts or self.ends < self.starts:
            return "the tests did not run to their end"
        if self.strange:
            return "something else than pytest spoke in its name"
        if not self.controls or set(self.controls) != {"failed"}:
            return "a test that cannot pass did not fail: the code under test changed what tests say"
        return None


async def run_recorded(
    sandbox: Sandbox, plan: TestPlan, *, python: Sequence[str], timeout_s: float
) -> tuple[Exit, TestRecord | None]:
    """How the program ended, and its record; None where there is none that it signed."""
    for name, data in _programs().items():
        await retry_dropped(lambda name=name, data=data: sandbox.write(f"{_FOLDER}/{name}", data))
    key = secrets.token_hex(32)
    given: dict[str, Any] = {**msgspec.to_builtins(plan), "key": key, "log": LOG, "record": _RECORD}
    done = await sandbox.exec([*python, f"{_FOLDER}/{_FILES[0]}"], stdin=msgspec.json.encode(given), timeout=timeout_s)
    signature, _, body = (await retry_dropped(lambda: _read(sandbox, _RECORD)) or b"").partition(b"\n")
    return done, read_record(body) if _is_signed(signature, body, key) else None


async def read_log(sandbox: Sandbox, record: TestRecord) -> bytes | None:
    """All that the tests printed; None where the file is another one."""
    data = await retry_dropped(lambda: _read(sandbox, LOG))
    return data if data is not None and hashlib.sha256(data).hexdigest() == record.sha256 else None


async def _read(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.read(path, max_bytes=_MOST)
    except PathError:
        return None  # removed, replaced or too large by the doing of the code under test


def _is_signed(signature: bytes, body: bytes, key: str) -> bool:
    return hmac.compare_digest(signature, hmac.new(key.encode(), body, hashlib.sha256).hexdigest().encode())


def read_record(body: bytes) -> TestRecord | None:
    """None where it is none: a program of the code under test may have learnt the key."""
    try:
        return msgspec.json.decode(body, type=TestRecord)
    except BAD_JSON:
        return None


@cache
def _programs() -> dict[str, bytes]:
    inside = importlib.resources.files("rollyard.inside")
    return {name: inside.joinpath(name).read_bytes() for name in _FILES}
