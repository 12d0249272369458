"""Running a program on the host while building something: its own deadline, a chosen environment, a scratch home.

Install scripts of packages are other people's code. They get the variables on the list below and nothing else, so a key in
the caller's environment is not theirs to read.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL

import anyio
import stamina

from rollyard.core.cache import cache_home
from rollyard.core.errors import CommandFailed, CommandTimeout

PASSED = (
    "PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "all_proxy",
)  # fmt: skip
PASSED_PREFIXES = ("PIP_", "NPM_CONFIG_", "npm_config_")
TAIL = 4000
# What pip and npm say when no index answers. It is not a hiccup: asking again only makes the caller wait.
UNREACHABLE = (
    "Temporary failure in name resolution", "Name or service not known", "Network is unreachable", "No route to host",
    "Failed to establish a new connection", "ConnectTimeoutError", "EAI_AGAIN", "ENOTFOUND", "ENETUNREACH", "ECONNREFUSED",
    "ETIMEDOUT",
)  # fmt: skip
# Unless the caller's environment says otherwise: an index that is there answers sooner, one that is not is soon known.
SHORT_WAITS = {
    "PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10", "npm_config_fetch_retries": "1",
    "npm_config_fetch_retry_mintimeout": "1000",
}  # fmt: skip

_OFFLINE = (
    "no package index answers: build this once where there is a network (what is built is kept), or set PIP_INDEX_URL,"
    " npm_config_registry or a proxy"
)


def build_env(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an install: settings of package managers and proxies, a scratch home, caches that are shared."""
    env = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}
    cache = cache_home()
    env |= {"HOME": str(home), "TMPDIR": str(home), "CI": "1", "TERM": "dumb"}
    for name, value in SHORT_WAITS.items():
        if name.lower() not in {given.lower() for given in env}:
            env[name] = value
    env |= {"PIP_CACHE_DIR": str(cache / "pip"), "npm_config_cache": str(cache / "npm")}
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
            unreachable = _unreachable(stderr, text)
            last = [unreachable] if unreachable else (stderr.strip() or text.strip()).splitlines()[-3:]
            raise CommandFailed(
                f"{what} ended with exit code {code}: {' | '.join(last)}",
                exit_code=code,
                stdout=text,
                stderr=stderr,
                hint=_OFFLINE if unreachable else None,
            )
        return stdout


async def run_program_retried(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout: float, what: str, attempts: int = 3
) -> bytes:
    """For steps that fetch: the network is allowed to fail twice. The last error is the one that is raised, and at once
    where no index can be reached."""
    async for attempt in stamina.retry_context(on=_may_pass, attempts=attempts, timeout=None, wait_initial=1.0):
        with attempt:
            return await run_program(argv, env=env, cwd=cwd, timeout=timeout, what=what)
    raise AssertionError("unreachable: the last attempt raises")


def _unreachable(stderr: str, stdout: str) -> str | None:
    """The line that says that no index could be reached."""
    lines = (line.strip() for line in f"{stderr}\n{stdout}".splitlines())
    return next((line[:400] for line in lines if any(sign in line for sign in UNREACHABLE)), None)


def _may_pass(error: Exception) -> bool:
    return isinstance(error, CommandFailed) and _unreachable(error.stderr, error.stdout) is None
