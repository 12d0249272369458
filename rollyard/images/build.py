"""Carrying out a Dockerfile on any backend that can snapshot: no daemon, one cached state per instruction.

A state's key is a hash of its parent's key, the instruction with its variables replaced, and the files it copies. An
instruction whose key is known costs a look-up; an unknown one is carried out in a sandbox of its own, which is kept. What
cannot be honoured is an error that names the line, never a silent skip. A `RUN` that needs the network is run like any
other, and its failure is shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from rollyard.core.errors import CommandFailed, ConfigError, Error, SandboxError, UnknownName, Unsupported
from rollyard.core.limits import Deadline
from rollyard.core.protocols import Backend, Sandbox
from rollyard.core.sandbox import DEFAULT_PATH, SandboxSpec, is_path
from rollyard.core.scratch import async_scratch
from rollyard.images import dockerfile, dockerfile_words
from rollyard.images.build_context import Context
from rollyard.images.build_copy import CopyInstruction, assemble, copy_key, fetch, upload_tree
from rollyard.images.build_types import (
    BuildCache,
    BuildOptions,
    Built,
    ForeseenImages,
    ForeseenStates,
    Images,
    NoCache,
)
from rollyard.images.dockerfile import BuildPlan, Instruction
from rollyard.images.mirrors import find_usable

_TAIL = 2000
_Act = Callable[[Sandbox], Awaitable[None]]


async def build(
    folder: str | Path, backend: Backend, images: Images, cache: BuildCache, options: BuildOptions | None = None
) -> Built:
    """Build the Dockerfile in `folder` and return the image; the same content gives the same image without running."""
    options = options or BuildOptions()
    if not backend.capabilities.snapshot:
        raise Unsupported(
            f"backend {backend.name!r} cannot keep a state as an image, so it cannot build {folder}",
            hint="name a ready image in environment.docker_image",
        )
    root = Path(folder)
    plan = await anyio.to_thread.run_sync(lambda: dockerfile.read(root / options.dockerfile, args=options.args))
    number = len(plan.stages) - 1
    if options.target is not None:
        found = plan.index(options.target)
        if found is None:
            raise plan.fail(1, f"there is no stage {options.target!r}")
        number = found
    deadline = Deadline.after(options.timeout_s, "environment.build_timeout_sec")
    try:
        with anyio.fail_after(options.timeout_s):
            return await _Builder(
                plan, Context(root, options.dockerfile), backend, images, cache, options, deadline
            ).stage(number)
    except TimeoutError:
        raise SandboxError(
            f"{plan.file}: not built within {options.timeout_s:g} s (environment.build_timeout_sec)"
        ) from None


async def foresee_states(
    folder: str | Path, backend: Backend, images: Images, options: BuildOptions | None = None
) -> tuple[str, ...]:
    """The keys of the states that a build would keep, without carrying it out: up to an instruction that copies out of another
    stage or image, or that cannot be honoured."""
    options = options or BuildOptions()
    root, keys = Path(folder), ForeseenStates()
    known = ForeseenImages(images, keys)
    deadline = Deadline.after(options.timeout_s, "environment.build_timeout_sec")
    try:
        plan = await anyio.to_thread.run_sync(lambda: dockerfile.read(root / options.dockerfile, args=options.args))
        builder = _Builder(plan, Context(root, options.dockerfile), backend, known, keys, options, deadline)
        await builder.stage(len(plan.stages) - 1)
    except Error:
        pass  # the build will say so itself
    return tuple(keys.keys)


async def carry_out(
    folder: str | Path, backend: Backend, sandbox: Sandbox | None, options: BuildOptions | None = None
) -> Built:
    """Carry the Dockerfile in `folder` out in a sandbox that was opened from its base, and keep no state. Without a sandbox
    nothing is done, and what comes back says what its programs are started with; `image` is the base."""
    options = options or BuildOptions()
    root = Path(folder)
    plan = await anyio.to_thread.run_sync(lambda: dockerfile.read(root / options.dockerfile, args=options.args))
    deadline = Deadline.after(options.timeout_s, "environment.build_timeout_sec")
    context = Context(root, options.dockerfile)
    async with AsyncExitStack() as stack:
        place = InPlace(sandbox, stack)
        builder = _Builder(plan, context, backend, place, NoCache(), options, deadline, place)
        try:
            with anyio.fail_after(options.timeout_s):
                return await builder.stage(len(plan.stages) - 1)
        except TimeoutError:
            raise SandboxError(
                f"{plan.file}: not built within {options.timeout_s:g} s (environment.build_timeout_sec)"
            ) from None


class _Builder:
    def __init__(
        self,
        plan: BuildPlan,
        context: Context,
        backend: Backend,
        images: Images,
        cache: BuildCache,
        options: BuildOptions,
        deadline: Deadline,
        place: InPlace | None = None,
    ) -> None:
        self.place = place
        self.plan, self.context, self.backend, self.images = plan, context, backend, images
        self.cache, self.options, self.deadline = cache, options, deadline
        self.done: dict[int, Built] = {}
        self.ids: dict[str, str] = {}  # what the names of images meant when they were first looked up

    async def stage(self, number: int) -> Built:
        if number not in self.done:
            run = _StageRun(self, number)
            await run.begin()
            for item in self.plan.stages[number].instructions:
                await run.step(item)
            self.done[number] = run.built
        return self.done[number]

    async def base(self, number: int) -> Built:
        stage = self.plan.stages[number]
        earlier = self.plan.index(stage.base)
        if earlier is not None and earlier < number:
            if self.place is not None:
                raise Unsupported(
                    f"{self.plan.file}:{stage.line}: FROM {stage.base}: a stage on another is not built here"
                )
            return await self.stage(earlier)
        if stage.base == "scratch":
            raise self.plan.fail(stage.line, "FROM scratch: an image without a shell has nothing to run an agent in")
        return await self.image(stage.base, stage.line)

    async def image(self, name: str, line: int) -> Built:
        if is_path(name):
            hint = "add it with `rollyard image add SOURCE --name NAME`, and say NAME"
            raise self.plan.fail(line, f"FROM {name}: an image has a name; a path of this machine is none", hint)
        if self.options.may_open is not None:
            await self.options.may_open(name)
        try:
            found = await self.images.resolve(name)
        except UnknownName as error:
            raise self.plan.fail(line, f"FROM {name}: {error.message}", error.hint) from error
        self.ids.setdefault(name, found.image)
        env = dict(found.env) if self.place is not None else {"PATH": DEFAULT_PATH, **found.env}
        return Built(
            image=name,
            env=env,
            workdir=found.workdir or "/",
            user=found.user,
            entrypoint=found.entrypoint,
            cmd=found.cmd,
        )

    def spec(self, image: str) -> SandboxSpec:
        options = self.options
        return SandboxSpec(
            image=self.ids.get(image, image),
            labels={"rollyard.build": self.plan.file[-200:]},
            ttl_s=options.timeout_s + 60.0,
            resources=options.resources,
            network=options.network,
            allowed_hosts=options.allowed_hosts,
            min_isolation=options.min_isolation,
            allow_unsafe=options.allow_unsafe,
        )


class InPlace:
    """The one sandbox of a build that keeps no state, or None; other stages have sandboxes of their own until it is over."""

    def __init__(self, sandbox: Sandbox | None, stack: AsyncExitStack) -> None:
        self.sandbox, self._stack = sandbox, stack
        self._stages: dict[int, Sandbox] = {}

    async def resolve(self, image: str) -> Built:
        """Nothing is known of an image that a provider keeps: programs get what it says by itself."""
        return Built(image=image)

    async def stage_sandbox(self, builder: _Builder, number: int) -> Sandbox:
        if number not in self._stages:
            base = await builder.base(number)
            opening = builder.backend.open(builder.spec(base.image))
            self._stages[number] = await self._stack.enter_async_context(opening)
        return self._stages[number]


class _StageRun:
    """One stage being built, and its state so far."""

    def __init__(self, builder: _Builder, number: int) -> None:
        self.builder, self.number = builder, number
        self.plan = builder.plan
        self.args: dict[str, str] = {}
        self.key = ""
        self.built = Built(image="")

    async def begin(self) -> None:
        base = await self.builder.base(self.number)
        self.built = msgspec.structs.replace(base, ran=0, cached=0)
        self.key = hashlib.sha256(f"image\0{self.builder.ids.get(base.image, base.image)}".encode()).hexdigest()

    @property
    def values(self) -> dict[str, str]:
        """What `$NAME` means here: environment over arguments."""
        return {**self.args, **self.built.env}

    def set(self, **fields: object) -> None:
        self.built = msgspec.structs.replace(self.built, **fields)

    def say(self, words: str) -> None:
        if self.builder.options.say is not None:
            self.builder.options.say(words)

    async def step(self, item: Instruction) -> None:
        self.say(f"{Path(self.plan.file).name}:{item.line}: {item.kind} {item.text}")
        try:
            await getattr(self, f"_{item.kind.lower()}")(item)
        except ValueError as error:
            raise self.plan.fail(item.line, f"{item.kind}: {error}") from error
        except ConfigError as error:
            if error.message.startswith(self.plan.file):
                raise
            raise self.plan.fail(item.line, f"{item.kind}: {error.message}", error.hint) from error

    def _expand(self, text: str) -> str:
        return dockerfile_words.expand(text, self.values, self.plan.escape)

    def _words(self, item: Instruction) -> list[str]:
        words = item.argv if item.argv is not None else dockerfile_words.split(item.text, self.plan.escape)
        return [self._expand(word) if item.argv is None else word for word in words]

    # what only changes how programs are started

    async def _arg(self, item: Instruction) -> None:
        declared = [word.partition("=")[0] for word in dockerfile_words.split(item.text, self.plan.escape)]
        known = {name: value for name, value in self.plan.globals.items() if name in declared}
        given = self.builder.options.args
        self.args |= {**known, **dockerfile.arguments(item, self.values, given, self.plan.escape, self.plan.file)}

    async def _env(self, item: Instruction) -> None:
        found = dockerfile_words.assignments(item.text, self.values, self.plan.escape)
        self.set(env={**self.built.env, **found})

    async def _label(self, item: Instruction) -> None:
        found = dockerfile_words.assignments(item.text, self.values, self.plan.escape)
        self.set(labels={**self.built.labels, **found})

    async def _maintainer(self, item: Instruction) -> None:
        self.set(labels={**self.built.labels, "maintainer": item.text})

    async def _user(self, item: Instruction) -> None:
        self.set(user=self._expand(item.text))

    async def _shell(self, item: Instruction) -> None:
        if not item.argv:
            raise ValueError('the shell is a JSON list, such as ["/bin/bash", "-c"]')
        self.set(shell=item.argv)

    async def _cmd(self, item: Instruction) -> None:
        self.set(cmd=item.argv if item.argv is not None else (*self.built.shell, item.text))

    async def _entrypoint(self, item: Instruction) -> None:
        self.set(entrypoint=item.argv if item.argv is not None else (*self.built.shell, item.text), cmd=())

    async def _expose(self, item: Instruction) -> None:
        self.set(expose=(*self.built.expose, *self._words(item)))

    async def _volume(self, item: Instruction) -> None:
        self.set(volumes=(*self.built.volumes, *self._words(item)))

    async def _stopsignal(self, item: Instruction) -> None:
        self.set(stop_signal=self._expand(item.text))

    async def _healthcheck(self, item: Instruction) -> None:
        flags = "".join(f"--{name}={value} " for name, value in item.flags)
        self.set(healthcheck=None if item.text.upper() == "NONE" else f"{flags}{item.text}")

    # what changes files

    async def _workdir(self, item: Instruction) -> None:
        path = self._expand(item.text)
        whole = path if path.startswith("/") else f"{self.built.workdir.rstrip('/')}/{path}"
        self.set(workdir=whole.rstrip("/") or "/")

        async def create(sandbox: Sandbox) -> None:
            await sandbox.mkdir(self.built.workdir)

        await self._state(item, ("workdir", self.built.workdir), create)

    async def _run(self, item: Instruction) -> None:
        for name, value in item.flags:
            if name == "network" and value != "default" and value != self.builder.options.network:
                raise Unsupported(
                    f"RUN --network={value}: the whole build has network {self.builder.options.network!r}"
                )
        scratch = _scratch_mounts(item)
        command = _command(item, self.built.shell)
        env = {**self.args, **self.built.env}
        built = self.built

        async def run(sandbox: Sandbox) -> None:
            for path in scratch:
                await sandbox.mkdir(path)
            mirrors = await find_usable(self.builder.options.env, sandbox)
            done = await sandbox.exec(
                command,
                env={**mirrors, **env},
                cwd=built.workdir,
                user=built.user,
                timeout=max(1.0, self.builder.deadline.left),
            )
            self.say(done.text + ("\n[the rest of its output was not kept]" if done.truncated else ""))
            if not done.ok:
                how = "ran out of time" if done.timed_out else f"exited with {done.exit_code}"
                raise CommandFailed(
                    f"{self.plan.file}:{item.line}: RUN {item.text[:200]} {how}:\n{done.text[-_TAIL:].strip()}",
                    exit_code=done.exit_code,
                    stdout=done.stdout.decode("utf-8", "replace"),
                    stderr=done.stderr.decode("utf-8", "replace"),
                    hint=_network_hint(self.builder.options.network, done.text),
                )
            for path in scratch:
                await sandbox.remove(path)

        identity = ("run", *command, repr(sorted(env.items())), built.workdir, built.user or "", *scratch)
        await self._state(item, identity, run)

    async def _copy(self, item: Instruction) -> None:
        await self._copy_or_add(item)

    async def _add(self, item: Instruction) -> None:
        await self._copy_or_add(item)

    async def _copy_or_add(self, item: Instruction) -> None:
        origin = item.flag("from")
        request = CopyInstruction(
            item=item,
            words=tuple(self._words(item)),
            workdir=self.built.workdir,
            chown=self._expand(item.flag("chown") or "") or None,
            chmod=self._expand(item.flag("chmod") or "") or None,
            expand=self._expand,
        )
        if origin is None:
            await self._copy_from_context(item, request)
        elif self.builder.place is None or self.builder.place.sandbox is not None:
            await self._copy_from_image(item, request, self._expand(origin))

    async def _copy_from_context(self, item: Instruction, request: CopyInstruction) -> None:
        """Files are assembled where the state is not known: looking a state up copies nothing."""
        context = self.builder.context
        key = await anyio.to_thread.run_sync(copy_key, request, context)

        async def copy(sandbox: Sandbox) -> None:
            async with async_scratch("copy") as folder:
                tree = await anyio.to_thread.run_sync(assemble, request, context, folder)
                await upload_tree(sandbox, tree, request, max(1.0, self.builder.deadline.left))

        await self._state(item, ("copy", key, request.target, request.chown or "", request.chmod or ""), copy)

    async def _copy_from_image(self, item: Instruction, request: CopyInstruction, origin: str) -> None:
        async with async_scratch("copy") as folder:
            async with self._origin(origin, item.line) as other:
                tree, key = await fetch(request, other, folder)

            async def copy(sandbox: Sandbox) -> None:
                await upload_tree(sandbox, tree, request, max(1.0, self.builder.deadline.left))

            identity = ("fetch", key, tree.target, str(tree.into), request.chown or "", request.chmod or "")
            await self._state(item, identity, copy)

    @asynccontextmanager
    async def _origin(self, name: str, line: int) -> AsyncGenerator[Sandbox]:
        """Another stage or image, to copy from."""
        number, place = self.plan.index(name), self.builder.place
        if place is not None and number is not None and number < self.number:
            await self.builder.stage(number)
            yield await place.stage_sandbox(self.builder, number)
            return
        if isinstance(self.builder.cache, ForeseenStates):
            raise Unsupported(f"{self.plan.file}:{line}: what {name!r} has is known once it is built")
        async with self.builder.backend.open(await self._other(name, line)) as other:
            yield other

    async def _other(self, name: str, line: int) -> SandboxSpec:
        number = self.plan.index(name)
        if number is not None and number < self.number:
            built = await self.builder.stage(number)
        else:
            built = await self.builder.image(name, line)
        return self.builder.spec(built.image)

    async def _state(self, item: Instruction, identity: tuple[str, ...], act: _Act) -> None:
        """Move on to the state after `item`: from the cache, or by acting on it and keeping what came out. Each has a sandbox of
        its own, so that what is kept is what this instruction wrote, and no process of one lives on in the next."""
        if self.builder.place is not None:
            last = self.number == len(self.plan.stages) - 1
            sandbox = self.builder.place.sandbox
            if sandbox is not None:
                await act(sandbox if last else await self.builder.place.stage_sandbox(self.builder, self.number))
                self.set(ran=self.built.ran + 1)
            return
        text = "\0".join((self.key, *identity))
        self.key = hashlib.sha256(text.encode()).hexdigest()
        name = f"{self.builder.backend.name}-{self.key}"
        known = self.builder.cache.get(name)
        if known is not None and await self._alive(known.decode(), name):
            self.set(image=known.decode(), cached=self.built.cached + 1)
            self.say("kept from an earlier build")
            return
        async with self.builder.backend.open(self.builder.spec(self.built.image)) as sandbox:
            await act(sandbox)
            image = await sandbox.snapshot()
        self.builder.cache.put(name, image.encode())
        self.set(image=image, ran=self.built.ran + 1)

    async def _alive(self, image: str, name: str) -> bool:
        """A cached state may have been cleaned away since."""
        try:
            await self.builder.images.resolve(image)
        except UnknownName:
            self.builder.cache.drop(name)
            return False
        return True


def _command(item: Instruction, shell: tuple[str, ...]) -> tuple[str, ...]:
    """RUN's argv: its own list, or its text given to the shell, with a here-document as the script it is."""
    if item.argv is not None:
        return item.argv
    if not item.heredocs:
        return (*shell, item.text)
    first = item.heredocs[0]
    if item.text.strip().startswith("<<"):
        return (*shell, first.text)
    bodies = "".join(f"{heredoc.text}{heredoc.name}\n" for heredoc in item.heredocs)
    return (*shell, f"{item.text}\n{bodies}")


def _scratch_mounts(item: Instruction) -> tuple[str, ...]:
    """Targets of cache and tmpfs mounts: there while RUN runs, gone afterwards. Others cannot be honoured."""
    found: list[str] = []
    for name, value in item.flags:
        if name != "mount":
            continue
        pairs = [part.partition("=") for part in value.split(",")]
        options = {key: text for key, _, text in pairs}
        target = options.get("target") or options.get("dst") or options.get("destination")
        if options.get("type") not in ("cache", "tmpfs") or not target or not target.startswith("/"):
            raise Unsupported(f"RUN --mount={value} is not supported", hint="COPY what the command needs")
        found.append(target)
    return tuple(found)


_NETWORK_SIGNS = (
    "Could not resolve",
    "Temporary failure in name resolution",
    "Temporary failure resolving",
    "Network is unreachable",
    "Name or service not",
    "Failed to establish a new connection",
    "getaddrinfo",
    "EAI_AGAIN",
    "ENETUNREACH",
)


def _network_hint(network: str, output: str) -> str | None:
    """What to do about a command that missed the network."""
    if network == "none" and any(sign in output for sign in _NETWORK_SIGNS):
        return (
            "a Dockerfile is built without a network. Give it one (--build-network allow:HOST,... or public, an option of"
            " `serve plane` too), copy what RUN needs into the build folder (wheels, archives), or build the image elsewhere,"
            " take it in with `rollyard image add ARCHIVE --name NAME` and set docker_image = NAME in task.toml"
        )
    return None
