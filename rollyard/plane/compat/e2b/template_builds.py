"""Carrying out a template's steps in a sandbox of the server's own, which becomes an image.

Steps mean what they do at the vendor's: they begin as `user` in `/home/user`, `COPY` places the files of an archive that the
client uploaded before, and a start command runs in every sandbox of the template. There is no cache of steps: each build
carries all of them out, so `force` changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollyard.core.errors import Error, UnknownName
from rollyard.core.log import Log
from rollyard.core.plane import ApiKey
from rollyard.core.protocols import Backend, OwnImages
from rollyard.core.sandbox import Resources
from rollyard.images.store import ImageStore
from rollyard.plane.compat.e2b.accounts import DEFAULT_USER
from rollyard.plane.compat.e2b.boxes import Boxes, E2bSandbox, owner_of
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.e2b.templates import BASE, BuildLine, Template, TemplateBuild, Templates

BUILD_S = 3600.0
READY_S = 60.0
_READY_LOOK_S = 0.5
_PART = 32 * 2**20
_STAGE = "/tmp/.rollyard-copy"
_TAIL = 2000
_VENDOR_BASE = "e2bdev/base"
_BODY = {"fromImage", "fromTemplate", "force", "steps", "startCmd", "readyCmd"}
# $1 where the archive's parts are, $2 the source (a pattern), $3 the destination, $4 its owner, $5 its mode
_COPY = """set -e; shopt -s nullglob dotglob globstar; mkdir -p "$1/tree"; cat "$1"/part.* >"$1/all"
tar -xzpf "$1/all" -C "$1/tree" --no-same-owner 2>/dev/null || tar -xpf "$1/all" -C "$1/tree" --no-same-owner
own() { [ -z "$owner" ] || chown -h $1 "$owner:" "${@:2}"; }
set_mode() { [ -z "$mode" ] || chmod $1 "$mode" "${@:2}"; }
cd "$1/tree"; found=($2); owner=$4 mode=$5; [ ${#found[@]} -gt 0 ] || { echo "no files match $2"; exit 1; }
into=; case $3 in */) into=1;; esac; [ ${#found[@]} -eq 1 ] || into=1; [ ! -d "$3" ] || into=1
for one in "${found[@]}"; do
if [ -d "$one" ] && [ ! -L "$one" ]; then mkdir -p "$3"; cp -a "$one/." "$3/"; own -R "$3"; set_mode -R "$3"
elif [ -n "$into" ]; then mkdir -p "$3"; cp -a "$one" "$3/"; own "" "$3/${one##*/}"; set_mode "" "$3/${one##*/}"
else mkdir -p "$(dirname "$3")"; cp -aT "$one" "$3"; own "" "$3"; set_mode "" "$3"; fi; done
cd /; rm -rf "$1"
"""


class TemplateBuilder:
    def __init__(self, boxes: Boxes, templates: Templates) -> None:
        self._boxes, self._templates = boxes, templates
        self._running: dict[str, tuple[Template, asyncio.Task[None]]] = {}
        self._log = Log("rollyard.plane.compat.e2b")

    def watch(self, template: Template, build_id: str) -> TemplateBuild | None:
        """A build as it is now: the one that runs here, or what was written of it."""
        running = self._running.get(build_id)
        return (running[0] if running else template).builds.get(build_id)

    def start(self, caller: ApiKey | None, template: Template, build: TemplateBuild, asked: Mapping[str, Any]) -> None:
        if build.state != "waiting":
            raise E2bRefusal("already_exists", f"build {build.id} was started before", 409)
        for name in asked:
            if name not in _BODY and asked[name]:
                raise E2bRefusal("unimplemented", f"{name} is not served here", 400)
        build.state = "building"
        self._templates.save(template)
        task = asyncio.create_task(self._finish(caller, template, build, asked), name=f"rollyard-template-{build.id}")
        self._running[build.id] = (template, task)
        task.add_done_callback(lambda _: self._running.pop(build.id, None))

    async def _finish(
        self, caller: ApiKey | None, template: Template, build: TemplateBuild, asked: Mapping[str, Any]
    ) -> None:
        try:
            async with asyncio.timeout(BUILD_S):
                await self._build(caller, build, asked)
            build.state = "ready"
        except (Error, E2bRefusal, TimeoutError) as error:
            build.error = str(getattr(error, "message", error)) or f"not built within {BUILD_S:g} s"
            build.state = "error"
            build.lines.append(BuildLine(at=time.time(), message=build.error, level="error", step=build.failed_step))
        except Exception as error:  # noqa: BLE001 - whoever waits for the build is told; the cause is the operator's
            self._log.exception("template.build_failed", build=build.id)
            build.error, build.state = f"the server failed: {type(error).__name__}", "error"
        self._templates.save(template)

    async def _build(self, caller: ApiKey | None, build: TemplateBuild, asked: Mapping[str, Any]) -> None:
        base = _base_of(asked)
        made = {"templateID": base, "timeout": BUILD_S, "metadata": {}}
        box = await self._boxes.create(caller, made, None, resources=build.resources)
        try:
            run = _BuildRun(box, build, self._templates, owner_of(caller))
            inherited = self._templates.of_image(box.image)
            if inherited is not None:
                run.inherit(inherited[1])
            for number, step in enumerate(asked.get("steps") or (), 1):
                build.failed_step = str(number)
                await run.step(step, number)
            build.failed_step = None
            await run.settle(asked)
            run.say("Finalizing the template")
            build.image = await self._boxes.snapshot(caller, box.id)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._boxes.kill(caller, box.id)))


class _BuildRun:
    """One build in its sandbox: who runs the next step, where, with which environment."""

    def __init__(self, box: E2bSandbox, build: TemplateBuild, templates: Templates, owner: str) -> None:
        self.box, self.build, self.templates, self.owner = box, build, templates, owner
        self.user, self.workdir = DEFAULT_USER, ""
        self.env: dict[str, str] = {}

    def inherit(self, base: TemplateBuild) -> None:
        self.user, self.workdir, self.env = base.user or DEFAULT_USER, base.workdir or "", dict(base.env)
        self.build.start, self.build.ready = base.start, base.ready

    def say(self, message: str, step: str | None = None) -> None:
        self.build.lines.append(BuildLine(at=time.time(), message=message, step=step))

    async def step(self, asked: Mapping[str, Any], number: int) -> None:
        kind, args = str(asked.get("type")), [str(one) for one in asked.get("args") or ()]
        self.say(f"[{number}] {kind} {' '.join(args)}"[:_TAIL], str(number))
        if kind == "RUN" and args:
            await self.run(args[0], args[1] if len(args) > 1 and args[1] else self.user, number)
        elif kind == "ENV" and len(args) % 2 == 0:
            self.env |= dict(zip(args[::2], args[1::2], strict=True))
        elif kind == "WORKDIR" and args:
            self.workdir = await self.box.accounts.path(_below(await self.place(), args[0]), self.user)
            await self.box.sandbox.mkdir(self.workdir, user=self.box.accounts.as_user(self.user))
        elif kind == "USER" and args:
            await self.box.accounts.home(args[0])
            self.user = args[0]
        elif kind == "COPY" and len(args) >= 2:
            await self.copy(args, str(asked.get("filesHash") or ""))
        else:
            raise E2bRefusal("unimplemented", f"step {number}: {kind} with {len(args)} arguments is not served here")

    async def place(self) -> str:
        return self.workdir or await self.box.accounts.home(self.user)

    async def run(self, command: str, user: str, number: int) -> None:
        try:
            await self.box.accounts.home(user)
            done = await self.box.sandbox.exec(
                ["/bin/bash", "-c", command],
                env=self.env,
                cwd=await self.place(),
                user=self.box.accounts.as_user(user),
                timeout=BUILD_S,
            )
        except E2bRefusal as error:
            told = f"failed to run command '{command}': command failed: {error.code}: {error.message}"
            raise E2bRefusal(error.code, told) from error
        for line in done.text.splitlines()[-100:]:
            self.say(line, str(number))
        if not done.ok:
            raise E2bRefusal(
                "invalid_argument",
                f"failed to run command '{command}': exit status {done.exit_code}: {done.text[-_TAIL:]}",
            )

    async def copy(self, args: list[str], digest: str) -> None:
        source, target, owner, mode = (*args, "", "")[:4]
        archive = self.templates.archive(self.owner, digest)
        if not archive.is_file():
            raise E2bRefusal("invalid_argument", f"the files of COPY {source} were not uploaded")
        place = f"{_STAGE}-{self.build.id[:8]}"
        await self._put(archive, place)
        slash = "/" if target.endswith("/") else ""
        whole = await self.box.accounts.path(_below(await self.place(), target), self.user)
        owner = owner or self.user
        named = owner if self.box.sandbox.capabilities.users else ""
        words = ["/bin/bash", "-c", _COPY, "rollyard", place, source, whole + slash, named, mode]
        root = self.box.accounts.as_user("root")
        done = await self.box.sandbox.exec(words, cwd="/", user=root, timeout=BUILD_S)
        if not done.ok:
            raise E2bRefusal("invalid_argument", f"COPY {source} {target}: {done.text[-_TAIL:].strip()}")

    async def _put(self, archive: Path, place: str) -> None:
        with archive.open("rb") as stream:
            number = 0
            while part := await asyncio.to_thread(stream.read, _PART):
                await self.box.sandbox.write(f"{place}/part.{number:04d}", part)
                number += 1

    async def settle(self, asked: Mapping[str, Any]) -> None:
        """How programs of the template start; its start command is proved here."""
        build = self.build
        build.env, build.user, build.workdir = self.env, self.user, self.workdir or None
        build.start, build.ready = asked.get("startCmd") or build.start, asked.get("readyCmd") or build.ready
        await run_start(self.box, build)


async def run_start(box: E2bSandbox, build: TemplateBuild) -> None:
    """The template's own program, and the look that says it is ready."""
    if build.start is None and build.ready is None:
        return
    user, env, cwd = box.accounts.as_user(None), build.env, await box.accounts.workdir(None)
    if build.start:
        await box.sandbox.start(["/bin/bash", "-l", "-c", build.start], env=env, cwd=cwd, user=user)
    until = time.monotonic() + READY_S
    while build.ready:
        words = ["/bin/bash", "-l", "-c", build.ready]
        done = await box.sandbox.exec(words, env=env, cwd=cwd, user=user, timeout=READY_S)
        if done.ok:
            return
        if time.monotonic() > until:
            raise E2bRefusal("deadline_exceeded", f"the template was not ready in {READY_S:g} s: {build.ready}")
        await asyncio.sleep(_READY_LOOK_S)


async def start_or_kill(box: E2bSandbox, build: TemplateBuild) -> None:
    """A sandbox whose template's own program does not come up is nobody's."""
    try:
        await run_start(box, build)
    except BaseException:  # cancelled too
        await asyncio.shield(asyncio.ensure_future(box.sandbox.kill()))
        raise


async def remove_image(backend: Backend, image: str) -> None:
    """An image that no template leads to any more, from wherever the backend keeps it."""
    images = getattr(backend, "images", None)
    try:
        if isinstance(backend, OwnImages):
            await backend.remove_image(image)
        elif isinstance(images, ImageStore):
            await images.remove(image)
    except UnknownName:
        return


def read_resources(asked: Mapping[str, Any]) -> Resources:
    cpus, memory = asked.get("cpuCount"), asked.get("memoryMB")
    for name, value in (("cpuCount", cpus), ("memoryMB", memory)):
        if value is not None and (not isinstance(value, int) or value <= 0):
            raise E2bRefusal("invalid_argument", f"{name} is a positive number")
    return Resources(cpus=cpus, memory_mb=memory)


def _base_of(asked: Mapping[str, Any]) -> str:
    image, template = asked.get("fromImage"), asked.get("fromTemplate")
    if bool(image) == bool(template):
        raise E2bRefusal("invalid_argument", "a template is built from one of fromImage and fromTemplate")
    if isinstance(image, str) and image.partition(":")[0] == _VENDOR_BASE:
        return BASE
    return str(image or template)


def _below(place: str, path: str) -> str:
    return path if path.startswith(("/", "~")) else f"{place.rstrip('/')}/{path}"
