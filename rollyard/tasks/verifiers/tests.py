"""Putting a task's tests into a judge's sandbox: laid over each other on the host, less ignored files, then uploaded once."""

from __future__ import annotations

import anyio.to_thread

from rollyard.core.errors import VerifierError
from rollyard.core.protocols import Sandbox
from rollyard.core.rollout import Rollout
from rollyard.core.scratch import scratch
from rollyard.core.task import VerifierSpec
from rollyard.tasks.harbor.files import stage
from rollyard.tasks.verifiers.sandbox import TESTS


async def upload_tests(spec: VerifierSpec, sandbox: Sandbox, rollout: Rollout) -> None:
    if spec.bundled:
        return
    with scratch("tests") as root:
        await anyio.to_thread.run_sync(lambda: stage(spec.tests, root, source=rollout.task.source))
        script = root / "test.sh"
        if script.is_file():
            script.chmod(0o755)
        if not any(root.iterdir()):
            raise VerifierError("the task has no tests to run", hint="put them into tests/")
        await sandbox.upload_dir(str(root), TESTS)
