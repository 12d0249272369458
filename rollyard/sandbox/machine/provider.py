"""A machine of the user's own as a provider. Programs are started by its shell with their stdin and stdout connected, so this is
a link that streams; what is secret goes by stdin, and stands in no command line of any machine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import re
import shlex
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar

from rollyard.core.errors import ConfigError, Error, PathError, SandboxError, SandboxInterrupted, Unsupported
from rollyard.core.ids import new_id
from rollyard.core.sandbox import DEFAULT_PATH
from rollyard.sandbox.machine.shells import READ, MachineShell, kill_group, script_file
from rollyard.sandbox.paths import ROOT
from rollyard.sandbox.remote.errors import gone_error
from rollyard.sandbox.remote.provider import FoundSandbox, KeptImage, SandboxProvider, SandboxRequest, StreamingLink

_INSIDE = f'{READ}; eval "$s"'
_NOT_THERE, _REFUSED, _GONE = 95, 96, 97  # exit codes of the scripts
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_IMAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_TAIL = 4096
_CHUNK = 2**16
# Under a name of ours first: an upload that broke half way is never seen.
_PUT = """p={path}; t={root}/x/{name}; cat >"$t" && [ "$(wc -c <"$t")" -eq {size} ] || {{ rm -f "$t"; exit 1; }}
[ ! -d "$p" ] && mkdir -p -- "$(dirname -- "$p")" && cat "$t" >"$p"; c=$?; rm -f "$t"; exit $c"""


class MachineProvider(SandboxProvider):
    """`kind` is what a sandbox is on the machine; `folder` is where they are kept there; `settings` is a file of an image with
    its environment."""

    keeps_images: ClassVar[bool] = True

    def __init__(self, shell: MachineShell, *, kind: str, folder: str | None, settings: str = "") -> None:
        super().__init__()
        self._shell, self._kind, self._folder, self.settings = shell, kind, folder, settings
        self._scripts = script_file()
        self._file = f"machine-{hashlib.sha256(self._scripts.encode()).hexdigest()[:16]}.sh"

    async def enter(self) -> None:
        try:
            await self._install()
            await self.ask("check_" + self._kind)
        except BaseException:  # cancelled too: `__aexit__` is not called for what was not entered
            await self._shell.close()
            raise

    async def leave(self) -> None:
        await self._shell.close()

    def _place(self) -> str:
        return f"f={shlex.quote(self._folder)}" if self._folder else "f=${TMPDIR:-/tmp}/rollyard-$(id -u)"

    async def _install(self) -> None:
        """The scripts, in a folder that is this user's alone."""
        script = (
            f'{self._place()}; umask 077; mkdir -p "$f" 2>/dev/null; if [ ! -O "$f" ] || [ -L "$f" ] || ! chmod 700 "$f"; then '
            f'echo "$f is not a folder of $(id -un)\'s own" >&2; exit {_REFUSED}; fi; mkdir -p "$f/boxes" "$f/images" && '
            f'cat >"$f/{self._file}.$$" && mv "$f/{self._file}.$$" "$f/{self._file}"'
        )
        async with self._shell.session() as argv:
            code, _, errors = await _communicate(argv, _header(script) + self._scripts.encode())
        if code:
            raise self._error(code, errors, "")

    def command(self, verb: str, *args: str) -> str:
        """A script that runs one of the scripts, from a folder that no other user could have made."""
        words = shlex.join((verb, *args))
        there = f'[ -O "$f" ] && [ ! -L "$f" ] && [ -f "$f/{self._file}" ] || exit {_NOT_THERE}'
        return f'{self._place()}; {there}; exec /bin/sh "$f/{self._file}" "$f" {words}'

    async def ask(self, verb: str, *args: str, given: bytes = b"", about: str = "") -> str:
        for again in (True, False):
            async with self._shell.session() as argv:
                code, said, errors = await _communicate(argv, _header(self.command(verb, *args)) + given)
            if code == _NOT_THERE and again:
                await self._install()  # the machine was cleaned
                continue
            if code:
                raise self._error(code, errors, about)
            return said.decode()
        raise AssertionError("unreachable")

    def _error(self, code: int | None, said: bytes, about: str) -> Error:
        text = " ".join(said.decode("utf-8", "replace").split())[-400:]
        if (failed := self._shell.failure(code, said)) is not None:
            return failed
        if code == _GONE:
            return gone_error(about)
        if code == _REFUSED:
            return ConfigError(
                f"{self._shell.name} cannot do it: {text}", hint="`rollyard doctor --sandbox` tries each step"
            )
        return SandboxError(f"{self._shell.name}: {text or f'exit code {code}'}")

    async def start(self, sandbox_id: str, script: str) -> MachineProgram:
        """A script in a sandbox; the connection is held until it ends."""
        stack = contextlib.AsyncExitStack()
        try:
            argv = await stack.enter_async_context(self._shell.session())
            process = await _spawn(argv)
        except BaseException:  # cancelled too: the place on the connection is given back
            await stack.aclose()
            raise
        assert process.stdin is not None
        process.stdin.write(_header(self.command("enter", sandbox_id, _INSIDE)) + _header(script))
        return MachineProgram(process, stack)

    async def run(self, sandbox_id: str, script: str, given: bytes = b"") -> tuple[int, bytes, bytes]:
        """The exit code, stdout and stderr of a script in a sandbox."""
        sent = _header(self.command("enter", sandbox_id, _INSIDE)) + _header(script) + given
        async with self._shell.session() as argv:
            code, said, errors = await _communicate(argv, sent)
        if code in (_GONE, _NOT_THERE):
            raise gone_error(sandbox_id)
        if (failed := self._shell.failure(code, errors)) is not None:
            raise failed
        return code, said, errors

    async def create(self, request: SandboxRequest) -> MachineLink:
        spec = request.spec
        _check_names(spec.env)
        made = f"sbx-{request.key}"
        about = base64.b64encode(json.dumps({"image": request.image, "labels": dict(request.labels)}).encode())
        env = base64.b64encode(json.dumps(dict(spec.env)).encode())
        seconds = str(math.ceil(request.lease_s))
        words = (made, seconds, self._kind, request.image, "host" if spec.network == "host" else "none")
        await self.ask("create", *words, given=about + b"\n" + env + b"\n", about=made)
        return MachineLink(self, made, spec.env)

    async def find(self, sandbox_id: str) -> tuple[MachineLink, FoundSandbox]:
        if not _ID.fullmatch(sandbox_id):
            raise gone_error(sandbox_id)
        for found, env in await self._list(sandbox_id):
            return MachineLink(self, sandbox_id, env), found
        raise gone_error(sandbox_id)

    async def list(self, labels: Mapping[str, str]) -> Sequence[FoundSandbox]:
        return [found for found, _ in await self._list()]

    async def _list(self, *only: str) -> list[tuple[FoundSandbox, dict[str, str]]]:
        found: list[tuple[FoundSandbox, dict[str, str]]] = []
        for line in (await self.ask("list", *only)).splitlines():
            name, end, made, about, env = line.split()
            labels = json.loads(base64.b64decode(about))
            one = FoundSandbox(
                id=name, image=labels["image"], labels=labels["labels"], created_at=float(made), expires_at=float(end)
            )
            found.append((one, json.loads(base64.b64decode(env))))
        return found

    async def delete(self, sandbox_id: str) -> bool:
        if not _ID.fullmatch(sandbox_id):
            return False
        return bool((await self.ask("delete", sandbox_id)).split())

    def delete_now(self, ids: Sequence[str], seconds: float) -> Sequence[str]:
        sent = _header(self.command("delete", *ids))
        try:
            done = subprocess.run(
                self._shell.one_shell(), input=sent, capture_output=True, timeout=seconds, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ids
        return [] if done.returncode == 0 else ids

    async def find_image(self, name: str) -> str | None:
        return name if name in (await self.ask("list_images")).split() else None

    async def list_images(self) -> Sequence[KeptImage]:
        return [KeptImage(name=name, image=name) for name in (await self.ask("list_images")).split()]

    async def delete_image(self, image: str) -> None:
        if not _IMAGE_NAME.fullmatch(image):
            raise ConfigError(f"{image!r} is not an image that was kept on {self._shell.name}")
        await self.ask("delete_image", image)

    def fault(self, error: Exception, text: str, about: str) -> Error:
        if isinstance(error, FileNotFoundError):
            return ConfigError(f"a program of this machine is missing: {text}", hint="install the OpenSSH client")
        return SandboxInterrupted(f"a call to {self._shell.name} broke: {text}")


class MachineLink(StreamingLink):
    def __init__(self, provider: MachineProvider, sandbox_id: str, env: Mapping[str, str]) -> None:
        self.id, self._provider = sandbox_id, provider
        self._env = env

    def _script(self, line: str, env: Mapping[str, str]) -> str:
        _check_names(env)
        words = [f"export {name}={shlex.quote(value)}" for name, value in {**self._env, **env}.items()]
        image = f"[ ! -f {self._provider.settings} ] || . {self._provider.settings}" if self._provider.settings else ":"
        return "\n".join([f"export PATH={DEFAULT_PATH} HOME=/root; {image}", *words, "unset l s; cd /", line])

    async def run(self, line: str, *, env: Mapping[str, str], timeout: float) -> str:
        code, said, errors = await self._provider.run(self.id, self._script(f"exec {line}", env))
        return (said if said or not code else errors).decode("utf-8", "replace")

    async def start(self, line: str, *, env: Mapping[str, str]) -> MachineProgram:
        return await self._provider.start(self.id, self._script(f"exec {line}", env))

    async def put(self, path: str, data: bytes) -> None:
        line = _PUT.format(path=shlex.quote(path), root=ROOT, name=new_id("put"), size=len(data))
        code, _, errors = await self._provider.run(self.id, self._script(line, {}), data)
        if code:
            raise SandboxError(f"{path} was not written: {errors[-200:].decode('utf-8', 'replace').strip()}")

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        line = f'p={shlex.quote(path)}; [ -f "$p" ] && exec head -c {max_bytes + 1} <"$p"; exit 1'
        code, said, _ = await self._provider.run(self.id, self._script(line, {}))
        if code:
            raise SandboxError(f"{path} cannot be read")
        if len(said) > max_bytes:
            raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
        return said

    async def alive(self) -> bool:
        return bool((await self._provider.ask("list", self.id)).strip())

    async def keep(self, seconds: float) -> None:
        await self._provider.ask("keep", self.id, str(math.ceil(seconds)), about=self.id)

    async def extend(self, end: float, labels: Mapping[str, str]) -> None:
        """Its time is what `keep` says."""

    async def snapshot(self) -> str:
        return await self.keep_image(new_id("snapshot"))

    async def keep_image(self, name: str) -> str:
        await self._provider.ask("keep_image", self.id, name, about=self.id)
        return name


class MachineProgram:
    """A program whose pipes are those of the shell that started it. It ends when its stdin does, or by the job's own kill."""

    def __init__(self, process: asyncio.subprocess.Process, held: contextlib.AsyncExitStack) -> None:
        self._process, self._held = process, held
        self._errors = b""
        self._reading = asyncio.create_task(self._read_errors(), name="rollyard-machine-errors")

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(_CHUNK):
            self._errors = (self._errors + data)[-_TAIL:]
        await self._process.wait()
        await self._held.aclose()

    async def output(self) -> AsyncIterator[str]:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(_CHUNK):
            yield data.decode("ascii", "replace")

    def last_errors(self) -> bytes:
        return self._errors

    async def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise SandboxError("the program has ended or closed its stdin") from None

    async def close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def kill(self) -> None:
        await self.disconnect()

    async def disconnect(self) -> None:
        await self.close_stdin()
        kill_group(self._process)
        assert self._process.stdout is not None
        with contextlib.suppress(RuntimeError):  # a reader has it, and will see its end
            await self._process.stdout.read()
        await self._reading


def _header(script: str) -> bytes:
    return base64.b64encode(script.encode()) + b"\n"


def _check_names(env: Mapping[str, str]) -> None:
    for name in env:
        if not name.isidentifier() or not name.isascii():
            raise Unsupported(f"a shell passes no variable named {name!r}", hint="use letters, digits and _")


async def _spawn(argv: Sequence[str]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


async def _communicate(argv: Sequence[str], given: bytes) -> tuple[int, bytes, bytes]:
    process = await _spawn(argv)
    try:
        said, errors = await process.communicate(given)
    except BaseException:  # cancelled too: a shell of ours is not left behind
        kill_group(process)
        await process.communicate()
        raise
    assert process.returncode is not None
    return process.returncode, said, errors
