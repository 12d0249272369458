"""A recorded rollout once more: the same task and agent, answered from the recording. Differences are reported, not hidden."""

from __future__ import annotations

from typing import Any

import msgspec

from rollyard import policy as policies
from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Backend
from rollyard.core.rollout import Rollout
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.store import Store


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """`mismatches` are the calls that differed from the recording, each with a diff."""

    original: str
    rollout: Rollout
    mismatches: tuple[Any, ...]

    @property
    def same(self) -> bool:
        return not self.mismatches


async def replay(
    store: Store, target: str, *, sandbox: str | Backend = "local", agent: str | None = None, strict: bool = False
) -> Replayed:
    """Run a kept rollout again from its recording. With `strict` a call that differs is an error to the agent."""
    kind, found = await store.resolve(target)
    if kind != "rollout":
        raise ConfigError(f"{target!r} is a run; replay takes one rollout", hint=f"rollyard list {target} shows them")
    kept = await store.get_rollout(found)
    if not kept.captured.records:
        raise ConfigError(f"rollout {found} has no recorded calls to answer from")
    policy = policies.replay(kept.captured, strict=strict)
    again = await run_rollout(
        kept.task, agent=agent or kept.agent, policy=policy, sandbox=sandbox, seed=kept.seed, store=store,
        labels={"replay_of": found},
    )  # fmt: skip
    return Replayed(original=found, rollout=again, mismatches=tuple(policy.mismatches))
