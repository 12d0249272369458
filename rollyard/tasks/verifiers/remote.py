"""`remote`: verifier code over a remote environment's databases, while the environment lives.

A rollout brings the environment along and judges with it. There is nothing to judge without one: a kept rollout's environment is
gone, so it cannot be judged again.
"""

from __future__ import annotations

from rollyard.core.errors import VerifierError
from rollyard.core.protocols import Policy, Sandbox, Verifier
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Site, VerifierSpec

# a place of its own, which nothing of the agent's comes to
SPEC = VerifierSpec(kind="remote", site=Site(), carry_workdir=False, network="none")


def make(spec: VerifierSpec, policy: Policy | None) -> Verifier:
    async def judge(sandbox: Sandbox, rollout: Rollout) -> Verdict:
        raise VerifierError(
            f"the environment of task {rollout.task.id!r} is gone, and only it could be judged",
            hint="a remote environment is judged once, when its rollout ends; run the task again",
        )

    return judge
