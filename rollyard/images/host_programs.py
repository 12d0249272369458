"""Running a program on the host while building something: its own deadline, a chosen environment, a scratch home.

Install scripts of packages are other people's code. They get the variables on the list below and nothing else, so a key in
the caller's environment is not theirs to read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import anyio
import stamina

from rollyard.core.cache import cache_home
from rollyard.core.errors import CommandFailed, CommandTimeout

PIP_FOUND_NOTHING = "No matching distribution found"
NPM_ERROR = re.compile(r'"error": \{\s*"code": "(\w+)",\s*"summary": ("(?:[^"\\]|\\.)*")')
PASSED = (
    "PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "all_proxy",
)  # fmt: skip
PASSED_PREFIXES = ("PIP_", "NPM_CONFIG_", "npm_config_")
# How long an index that does not answer is waited for. npm's own defaults are 70 s for one that refuses.
INDEX_TIMEOUTS = {
    "PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10", "npm_config_fetch_retries": "1", "npm_config_fetch_retry_mintimeout": "1000",
    "npm_config_fetch_timeout": "60000",
}  # fmt: skip
TAIL = 4000


def build_env(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an install: settings of package managers and proxies, a scratch home, caches that are shared."""
    env = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}
    cache = cache_home()
    env |= {"HOME": str(home), "TMPDIR": str(home), "CI": "1", "TERM": "dumb"}
    env |= {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_CACHE_DIR": str(cache / "pip"),
        "npm_config_cache": str(cache / "npm"),
    }
    given = {name.lower() for name in env}
    env |= {name: value for name, value in INDEX_TIMEOUTS.items() if name.lower() not in given}
    own = Path.home()
    if (own / ".npmrc").is_file():
        env.setdefault("NPM_CONFIG_USERCONFIG", str(own / ".npmrc"))
    for settings in (own / ".config/pip/pip.conf", own / ".pip/pip.conf"):
        if settings.is_file():
            env.setdefault("PIP_CONFIG_FILE", str(settings))
    return env | dict(extra or {})


async def run_program(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout: float, what: str) -> bytes:
    """Its stdout. A non-zero exit raises `CommandFailed` with the tail of both streams; a deadline kills its whole group."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = await anyio.open_process(
                list(argv), stdin=DEVNULL, stdout=out, stderr=err, env=dict(env), cwd=cwd, start_new_session=True
            )
        except OSError as error:
            raise CommandFailed(f"{what} did not start: {argv[0]}: {error.strerror}", exit_code=None) from error
        try:
            with anyio.fail_after(timeout):
                code = await process.wait()
        except TimeoutError:
            raise CommandTimeout(f"{what} did not end within {timeout:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await process.wait()
        out.seek(0)
        stdout = out.read()
        if code != 0:
            err.seek(0)
            stderr = err.read()[-TAIL:].decode("utf-8", "backslashreplace")
            text = stdout[-TAIL:].decode("utf-8", "backslashreplace")
            last = (stderr.strip() or text.strip()).splitlines()[-3:]
            raise CommandFailed(
                f"{what} ended with exit code {code}: {' | '.join(last)}", exit_code=code, stdout=text, stderr=stderr
            )
        return stdout


async def run_pip(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout: float, what: str) -> bytes:
    """pip asks its index again by itself: that it found nothing there, or no index, stands. A download that was cut is tried
    again; pip's exit code does not tell the two apart, its closing sentence does."""
    try:
        return await _retry(
            lambda error: PIP_FOUND_NOTHING not in error.stderr, argv, env=env, cwd=cwd, timeout=timeout, what=what
        )
    except CommandFailed as error:
        raise CommandFailed(error.message, exit_code=error.exit_code, stdout=error.stdout, stderr=error.stderr,
            hint="check the names and that pip reaches its index; it takes PIP_*, pip.conf and proxies as you set them",
        ) from error  # fmt: skip


async def run_npm(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout: float, what: str) -> bytes:
    """npm, told `--json` for its errors, asks its registry again by itself; only a download that came broken is tried again."""
    try:
        return await _retry(_came_broken, argv, env=env, cwd=cwd, timeout=timeout, what=what)
    except CommandFailed as error:
        found = NPM_ERROR.search(error.stdout)
        message = f"{what} failed: {found[1]}: {json.loads(found[2])}" if found else error.message
        raise CommandFailed(message, exit_code=error.exit_code, stdout=error.stdout, stderr=error.stderr,
            hint="check the names and that npm reaches its registry; it takes NPM_CONFIG_*, ~/.npmrc and proxies as you set them",
        ) from error  # fmt: skip


def _came_broken(error: CommandFailed) -> bool:
    found = NPM_ERROR.search(error.stdout)
    return found is not None and found[1] in {"EINTEGRITY", "ECONNRESET"}


async def _retry(heals: Callable[[CommandFailed], bool], argv: Sequence[str], **options: Any) -> bytes:
    """The last error is the one that is raised."""
    async for attempt in stamina.retry_context(
        on=lambda error: isinstance(error, CommandFailed) and heals(error), attempts=3, timeout=None, wait_initial=1.0
    ):
        with attempt:
            return await run_program(argv, **options)
    raise AssertionError("unreachable: the last attempt raises")
