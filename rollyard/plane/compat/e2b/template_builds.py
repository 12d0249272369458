"""Carrying out a template's steps in a sandbox of the server's own, which becomes an image.

Steps mean what they do at the vendor's: they begin as `user` in `/home/user`, `COPY` places the files of an archive that the
client uploaded before, and a start command runs in every sandbox of the template. There is no cache of steps: each build
carries all of them out, so `force` changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from rollyard.core.errors import Error
from rollyard.core.log import Log
from rollyard.core.plane import ApiKey
from rollyard.core.sandbox import Resources
from rollyard.images.mirrors import find_usable
from rollyard.plane.compat.e2b.accounts import DEFAULT_USER
from rollyard.plane.compat.e2b.boxes import E2bSandbox
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.e2b.instance_boxes import InstanceBoxes
from rollyard.plane.compat.e2b.template_start import run_start
from rollyard.plane.compat.e2b.templates import BASE, BuildLine, Template, TemplateBuild, Templates
from rollyard.plane.service.typed_records import TypedRecord

BUILD_S = 3600.0
HOLD_S = 30.0  # how long a build is let alone whose server says nothing
SAVE_S = 1.0  # how old what others see of a running build may be
_STAGE = "/tmp/.rollyard-copy"
_TAIL = 2000
_LINES = 20_000  # of one step, each a line of the client's log
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


class _Overtaken(Exception):
    """Another server has gone on with this build."""


class TemplateBuilder:
    """A build is held by the server that carries it out, in the store, for `hold_s` at a time. One whose server has died is begun
    anew by the next server that is asked about it."""

    def __init__(self, boxes: InstanceBoxes, *, hold_s: float = HOLD_S) -> None:
        self._boxes, self._templates, self._hold_s = boxes, boxes.templates, hold_s
        self._running: set[asyncio.Task[None]] = set()
        self._log = Log("rollyard.plane.compat.e2b")

    async def watch(self, template: Template, build_id: str) -> TemplateBuild | None:
        """A build as it was a moment ago, whichever server carries it out."""
        kept = await self._templates.build(template, build_id)
        if kept is None:
            return None
        if kept.value.state == "building" and (kept.record.due_at or 0.0) <= self._templates.clock():
            await self._take_up(kept)
        return kept.value

    async def start(self, caller: ApiKey, kept: TypedRecord[TemplateBuild], fields: Mapping[str, Any]) -> None:
        build = kept.value
        for name in fields:
            if name not in _BODY and fields[name]:
                raise E2bRefusal("unimplemented", f"{name} is not served here", 400)
        if build.state == "waiting":
            build.state, build.asked, build.key_id = "building", dict(fields), caller.id
            if await self._take_up(kept):
                return
        raise E2bRefusal("already_exists", f"build {build.id} was started before", 409)

    async def _take_up(self, kept: TypedRecord[TemplateBuild]) -> bool:
        """False when another server was first."""
        held = await self._templates.builds.put(kept, kept.value, due_at=self._templates.clock() + self._hold_s)
        if held is None:
            return False
        run = asyncio.create_task(self._finish(held), name=f"rollyard-template-{held.value.id}")
        self._running.add(run)
        run.add_done_callback(self._running.discard)
        return True

    async def _finish(self, held: TypedRecord[TemplateBuild]) -> None:
        build = held.value
        work = asyncio.create_task(self._work(build))
        try:
            while not (await asyncio.wait([work], timeout=min(SAVE_S, self._hold_s / 3)))[0]:
                held = await self._save(held, due_at=self._templates.clock() + self._hold_s)
            work.result()
            if build.image:
                await self._templates.note_image(build)
            await self._save(held, due_at=None)
        except _Overtaken:
            self._log.warning("template.build_overtaken", build=build.id)
        finally:
            work.cancel()
            await asyncio.wait([work])

    async def _save(self, held: TypedRecord[TemplateBuild], due_at: float | None) -> TypedRecord[TemplateBuild]:
        found = await self._templates.builds.put(held, held.value, due_at=due_at)
        if found is None:
            raise _Overtaken
        return found

    async def _work(self, build: TemplateBuild) -> None:
        """To the end of it, good or bad."""
        try:
            async with asyncio.timeout(BUILD_S):
                await self._build(build)
            build.state = "ready"
        except (Error, E2bRefusal, TimeoutError) as error:
            build.error = str(getattr(error, "message", error)) or f"not built within {BUILD_S:g} s"
            build.state = "error"
            build.lines.append(BuildLine(at=time.time(), message=build.error, level="error", step=build.failed_step))
        except Exception as error:  # noqa: BLE001 - the client that waits for the build gets the error; the cause is the operator's
            self._log.exception("template.build_failed", build=build.id)
            build.error, build.state = f"the server failed: {type(error).__name__}", "error"

    async def _build(self, build: TemplateBuild) -> None:
        await self._boxes.end_build(build)  # of a server that died
        build.lines = []
        box = await self._boxes.open_build(build, _base_of(build.asked), BUILD_S)
        try:
            mirrors = await find_usable(self._boxes.builds.mirrors, box.sandbox)
            run = _BuildRun(box, build, self._templates, mirrors)
            inherited = await self._templates.of_image(box.image)
            if inherited is not None:
                run.inherit(inherited)
            for number, step in enumerate(build.asked.get("steps") or (), 1):
                build.failed_step = str(number)
                await run.step(step, number)
            build.failed_step = None
            await run.settle(build.asked)
            run.say("Finalizing the template")
            build.image = await self._boxes.snapshot_build(build)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._boxes.end_build(build)))


class _BuildRun:
    """One build in its sandbox: who runs the next step, where, with which environment."""

    def __init__(self, box: E2bSandbox, build: TemplateBuild, templates: Templates, mirrors: Mapping[str, str]) -> None:
        self.box, self.build, self.templates, self.mirrors = box, build, templates, mirrors
        self.user, self.workdir = DEFAULT_USER, ""
        self.env: dict[str, str] = {}

    def inherit(self, base: TemplateBuild) -> None:
        self.user, self.workdir, self.env = base.user or DEFAULT_USER, base.workdir or "", dict(base.env)
        self.build.start, self.build.ready = base.start, base.ready

    def say(self, message: str, step: str | None = None) -> None:
        self.build.lines.append(BuildLine(at=time.time(), message=message, step=step))

    async def step(self, fields: Mapping[str, Any], number: int) -> None:
        kind, args = str(fields.get("type")), [str(one) for one in fields.get("args") or ()]
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
            await self.copy(args, str(fields.get("filesHash") or ""))
        else:
            raise E2bRefusal("unimplemented", f"step {number}: {kind} with {len(args)} arguments is not served here")

    async def place(self) -> str:
        return self.workdir or await self.box.accounts.home(self.user)

    async def run(self, command: str, user: str, number: int) -> None:
        try:
            await self.box.accounts.home(user)
            done = await self.box.sandbox.exec(
                ["/bin/bash", "-c", command],
                env={**self.mirrors, **self.env},
                cwd=await self.place(),
                user=self.box.accounts.as_user(user),
                timeout=BUILD_S,
            )
        except E2bRefusal as error:
            message = f"failed to run command '{command}': command failed: {error.code}: {error.message}"
            raise E2bRefusal(error.code, message) from error
        lines = done.text.splitlines()
        for line in lines[:_LINES]:
            self.say(line, str(number))
        if done.truncated or len(lines) > _LINES:
            self.say(f"[{max(0, len(lines) - _LINES)} or more lines were not kept]", str(number))
        if not done.ok:
            raise E2bRefusal(
                "invalid_argument",
                f"failed to run command '{command}': exit status {done.exit_code}: {done.text[-_TAIL:]}",
            )

    async def copy(self, args: list[str], digest: str) -> None:
        source, target, owner, mode = (*args, "", "")[:4]
        if not await self.templates.has_archive(self.build.owner, digest):
            raise E2bRefusal("invalid_argument", f"the files of COPY {source} were not uploaded")
        place = f"{_STAGE}-{self.build.id[:8]}"
        number = 0
        async for part in self.templates.read_archive(self.build.owner, digest):
            await self.box.sandbox.write(f"{place}/part.{number:04d}", part)
            number += 1
        slash = "/" if target.endswith("/") else ""
        whole = await self.box.accounts.path(_below(await self.place(), target), self.user)
        owner = owner or self.user
        named = owner if self.box.sandbox.capabilities.users else ""
        words = ["/bin/bash", "-c", _COPY, "rollyard", place, source, whole + slash, named, mode]
        root = self.box.accounts.as_user("root")
        done = await self.box.sandbox.exec(words, cwd="/", user=root, timeout=BUILD_S)
        if not done.ok:
            raise E2bRefusal("invalid_argument", f"COPY {source} {target}: {done.text[-_TAIL:].strip()}")

    async def settle(self, fields: Mapping[str, Any]) -> None:
        """How programs of the template start; its start command is proved here."""
        build = self.build
        build.env, build.user, build.workdir = self.env, self.user, self.workdir or None
        build.start, build.ready = fields.get("startCmd") or build.start, fields.get("readyCmd") or build.ready
        await run_start(self.box, build)


def read_resources(fields: Mapping[str, Any]) -> Resources:
    cpus, memory = fields.get("cpuCount"), fields.get("memoryMB")
    for name, value in (("cpuCount", cpus), ("memoryMB", memory)):
        if value is not None and (not isinstance(value, int) or value <= 0):
            raise E2bRefusal("invalid_argument", f"{name} is a positive number")
    return Resources(cpus=cpus, memory_mb=memory)


def _base_of(fields: Mapping[str, Any]) -> str:
    image, template = fields.get("fromImage"), fields.get("fromTemplate")
    if bool(image) == bool(template):
        raise E2bRefusal("invalid_argument", "a template is built from one of fromImage and fromTemplate")
    if isinstance(image, str) and image.partition(":")[0] == _VENDOR_BASE:
        return BASE
    return str(image or template)


def _below(place: str, path: str) -> str:
    return path if path.startswith(("/", "~")) else f"{place.rstrip('/')}/{path}"
