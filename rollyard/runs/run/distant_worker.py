"""A worker in a process of its own, here or on another machine: it opens the store, a sandbox backend, the policies and a gate
beside them, and works.

Model calls go from the gate here to the policy's own server; calls, events and verdicts go from here to the store; nothing
passes through the driver, which may be gone. It ends by itself when the run owes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

import msgspec

from rollyard.core.errors import ConfigError, Error, Retry
from rollyard.core.rollout import Rollout
from rollyard.gate import Gate
from rollyard.runs.rollout.open_backend import open_named
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.run.assignment import Assignment
from rollyard.runs.run.descriptors import raise_descriptor_limit
from rollyard.runs.run.policies import open_policies
from rollyard.runs.run.shipping import NodeImages, Shipment, unpack_work
from rollyard.runs.run.worker import Worker, WorkerResources
from rollyard.sandbox.local.backend import LocalBackend
from rollyard.store import Store

STORE_S = 60.0  # a worker that starts while its store restarts waits for it


class NodeAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is sent. `secrets` are variables that the policies read their keys from; they are kept nowhere."""

    work: Assignment
    store: str
    slots: float  # rollouts at a time
    sharers: int = 1  # workers of the run on the same machine
    shipment: Shipment = Shipment()
    alone: bool = False  # all workers are on this machine: what cannot be done here cannot be done
    gpus: int | None = None  # that this machine is said to have, where what needs some goes to the machines that do
    secrets: Mapping[str, str] = {}

    def __repr__(self) -> str:
        """As it may appear in logs: the store's URL may hold a password."""
        return f"NodeAssignment(run_id={self.work.run_id!r}, slots={self.slots}, secrets={sorted(self.secrets)})"


class WorkerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended: by itself, or with an error, and how that may be tried again. A plain value, since an error's own
    class may not survive the way back."""

    error: str | None = None
    hint: str | None = None
    retry: Retry | None = None


async def work_to_the_end(posting: NodeAssignment) -> WorkerEnd:
    """Work, and say how it ended."""
    ended = WorkerEnd()
    try:
        await work_here(posting)
    except* Error as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        assert isinstance(first, Error)
        ended = WorkerEnd(error=first.message, hint=first.hint, retry=first.retry)
    return ended


async def work_here(posting: NodeAssignment) -> None:
    """Work until the run owes nothing."""
    raise_descriptor_limit()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(Store.open(posting.store, wait_s=STORE_S))
        backend = await stack.enter_async_context(open_named(posting.work.config.sandbox, posting.work.config))
        provision = Provision.of(backend)
        work = await unpack_work(posting.work, posting.shipment, store, provision.images)
        answering = await open_policies(stack, work.config, store)
        gate = await stack.enter_async_context(Gate(next(iter(answering.values())), log=store))
        named = answering if work.policies != ("",) else {}
        means = WorkerResources(
            store,
            gate,
            backend,
            named,
            provision,
            sharers=posting.sharers,
            images=NodeImages(posting.shipment, store, provision.images) if store.shared else None,
            gpus=_check_gpus(posting, backend.gpus) if isinstance(backend, LocalBackend) else None,
        )
        worker = Worker(work, means)
        if posting.alone:
            worker.refuse_hopeless()
        await worker.run(posting.slots, _ignore)


def _check_gpus(posting: NodeAssignment, there: int) -> int | None:
    """How many an attempt may need here. A machine that cannot show its own to sandboxes would let those that need them wait for
    ever."""
    if posting.gpus is None:
        return None
    if there < posting.gpus and any(task.resources.gpus for task in posting.work.tasks.values()):
        raise ConfigError(
            f"this node is said to have {posting.gpus} GPUs, and sandboxes on it can have {there}",
            hint="they need a device node each (/dev/nvidia0) and the isolation level namespace: `rollyard doctor` there",
        )
    return there


async def _ignore(_: Rollout) -> None:
    """The driver reads finished rollouts from the store."""
