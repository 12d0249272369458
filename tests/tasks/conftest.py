"""Task folders, and sandboxes to judge in."""

import importlib.util
from pathlib import Path

import msgspec
import pytest

import rollyard as ry
from rollyard.core.cache import cache_home
from rollyard.core.rollout import Rollout
from rollyard.core.sandbox import SandboxSpec
from rollyard.sandbox import backend as make_backend
from rollyard.tasks.grade import Judging, judge
from rollyard.tasks.planted_files import look
from rollyard.tasks.python_startup import KnownFiles
from rollyard.tasks.rows import as_task
from rollyard.tasks.verifiers import verifier_for


@pytest.fixture(scope="session")
def folders():
    spec = importlib.util.spec_from_file_location("task_folders", Path(__file__).with_name("folders.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def sandbox_root(tmp_path_factory):
    """Sandboxes and snapshots of this session alone; layers are kept for the next one."""
    root, kept = tmp_path_factory.mktemp("sandboxes"), cache_home() / "test-layers"
    for name in ("layers", "index", "toolchains"):
        (kept / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(kept / name)
    return root


@pytest.fixture
async def backend(sandbox_root):
    async with make_backend("local", root=sandbox_root) as local:
        yield local


class Attempt:
    """An agent's sandbox, what a test does in it, and the verdict on that."""

    def __init__(self, task, backend, sandbox, place, workdir, before):
        self.task, self.backend, self.sandbox, self.place, self.workdir = task, backend, sandbox, place, workdir
        self.before = before

    async def act(self, script, *, user=None):
        """What the agent does, as root unless said otherwise."""
        done = await self.sandbox.exec(script, cwd=self.workdir, user=user, timeout=30)
        assert done.ok, done.text
        return done

    async def leave(self, script):
        """What the agent leaves running."""
        await self.sandbox.start(script, cwd=self.workdir)

    async def verdict(self, *, grade=None, verifier=None, policy=None, spec=None, **case):
        spec = spec or self.task.verifier
        if grade is not None:
            spec = msgspec.structs.replace(spec, grade=grade)
        rollout = Rollout(id="ro_test", task=self.task, **case.pop("rollout", {}))
        described = Judging(
            spec=spec,
            rollout=rollout,
            place=self.place,
            workdir=self.workdir,
            artifacts=self.task.artifacts,
            **{"timeout_s": 60.0, "before": self.before, **case},
        )
        return await judge(described, self.sandbox, self.backend, verifier or verifier_for(spec, policy))


@pytest.fixture
async def attempt(backend):
    """`async with attempt(task) as it`: a sandbox with the task's files in /app; `before` is what the task's setup does."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def start(task, *, image="host", workdir="/app", before="", **spec):
        task = as_task(task) if not isinstance(task, ry.Task) else task
        place = SandboxSpec(image=image, workdir=workdir, ttl_s=300, **spec)
        async with backend.open(place) as sandbox:
            await sandbox.mkdir(workdir)
            for file in task.files:
                await sandbox.write(f"{workdir}/{file.path}", file.data, mode=file.mode)
            if before:
                assert (await sandbox.exec(["bash", "-c", before], cwd=workdir, timeout=30)).ok
            yield Attempt(task, backend, sandbox, place, workdir, await look(sandbox, workdir, KnownFiles()))

    return start
