"""A session: one rollout's key, budget and trajectory at the gate, from open to close."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollyard.core.call import REPLAYED, Call, Dialect, Reply, Usage
from rollyard.core.lease import Lease
from rollyard.core.log import Log
from rollyard.core.protocols import Passthrough, Policy, Prefix, SessionRecord
from rollyard.gate.body_digest import BodyDigest
from rollyard.gate.classify import Shape
from rollyard.gate.fairness import Lane
from rollyard.gate.keys import key_hash
from rollyard.gate.limits import Budget
from rollyard.gate.pending import Turns
from rollyard.gate.refusals import StopReason
from rollyard.gate.session_parts import SECRETS, OwnParts, SessionIncomplete
from rollyard.trajectory.trajectory import Trajectory
from rollyard.wire.server_tools import ServerToolRefused, refuse_server_tools

if TYPE_CHECKING:
    from rollyard.gate.gate import Gate
    from rollyard.gate.listener import GateListener
    from rollyard.net.asgi import Mounted

_log = Log("rollyard.gate")
LOG_LINES = 100
MAX_REFUSED = 50  # names of a provider's tools that are kept
GAVE_UP = 499  # the agent left before its answer; nginx gave this number its meaning
EXCUSED_WAIT_S = 30.0  # an agent that waited so long for one answer had reason to leave


class RefusedCall(msgspec.Struct, frozen=True, kw_only=True):
    """Why the last call of a rollout got no answer, for the operator: `cause` may hold the model server's own words. Whose
    failure it is, the rollout says."""

    cause: str
    status: int | None = None  # the model server's, where it was one that refused; GAVE_UP where the agent did
    model: str = ""  # as the agent named it
    reason: StopReason | None = None  # what the agent's request ran into


class SessionPlan(NamedTuple):
    """What a session is opened with: who answers, within which budget, and what is known of the rollout."""

    policy: Policy
    budget: Budget
    settings: Mapping[str, Any] = {}
    metadata: Mapping[str, Any] = {}
    tools: Mounted | None = None
    held: bool = False
    lease: Lease | None = None
    server_tools: bool = True
    prefix: Prefix | None = None


class Session:
    """Made by `Gate.open_session`. `key` is None in a session that was restored: only its hash outlived the restart."""

    def __init__(
        self,
        gate: Gate,
        rollout_id: str,
        plan: SessionPlan,
        *,
        key: str | None = None,
        hashed: bytes | None = None,
        created_at: float | None = None,
        own: OwnParts = OwnParts(),  # noqa: B008 - frozen
    ) -> None:
        self.gate = gate
        self.rollout_id = rollout_id
        self.key = key
        self.key_hash = hashed if hashed is not None else key_hash(key or "")
        self.policy, self.budget, self.settings, self.metadata, self.tools, self.held, self.lease = plan[:7]
        self.server_tools = plan.server_tools  # whether a provider may search, fetch and run things for it
        self.prefix = plan.prefix  # the parent's calls that it begins with, where it branches off another rollout
        # awaited while a call of the agent's is held; told whether a recorded answer waits for it
        self.before_answer: Callable[[Call, bool], Awaitable[None]] | None = None
        self.replayed = 0  # calls that were answered out of it
        self.own = own  # what it has beyond the gate's policy, as the log keeps it
        self.missing: dict[str, str] = {}  # what of that a restart took, until it is supplied
        self.refused_tools: dict[str, int] = {}  # what it asked of that and did not get, and how often
        self.through: Passthrough | None = plan.policy if isinstance(plan.policy, Passthrough) else None
        self.created_at = time.time() if created_at is None else created_at
        self.trajectory = Trajectory(rollout_id)
        self.turns = Turns(gate.limits.replays)
        self.lane = Lane(plan.budget.concurrent)
        self.shape = Shape()
        self.memo: dict[bytes, Any] = {}
        self.body_digest = BodyDigest()
        self.listeners: set[GateListener] = set()
        self.calls = 0
        self.relayed = 0  # calls that passed through unread, those past the budget too
        self.relays: dict[str, float] = {}  # those that pass through now, with the time of their last byte
        self.prompt_tokens = 0
        self.cached_tokens: int | None = None  # of the prompt tokens, as far as servers tell
        self.completion_tokens = 0
        self.budget_stops = 0
        self.exhausted: str | None = None  # which part of the budget ran out first
        self.refused: RefusedCall | None = None  # None again once a later call was answered
        self.oldest_version: int | None = None  # that sampled any token of its answers
        self.answered = 0  # calls that the policy answered
        self.reached = False  # whether any request with this key arrived
        self.closing = False
        self.close_untold = False  # the log did not take that it is closed
        self.closed = False
        self.broken: str | None = None  # why nothing can be recorded any more
        self.restored = False  # its history is still to be read from the log
        self.restoring: asyncio.Task[None] | None = None
        self.last_activity = time.monotonic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=LOG_LINES)

    @property
    def in_flight(self) -> int:
        return len(self.turns.live) + len(self.relays)

    @property
    def unanswered_s(self) -> float:
        """How long the oldest call without an answer has waited."""
        waiting = [turn.call.received_at for turn in self.turns.live if turn.call is not None and turn.reply is None]
        waiting += self.relays.values()
        return max(0.0, time.time() - min(waiting)) if waiting else 0.0

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )

    def note(self, line: str, *values: Any) -> None:
        """A line for `log_tail`; with values it is a `%` format, filled in when it is read."""
        self._log.append((time.time(), line, values))

    def refuse_server_tools(self, dialect: Dialect, body: bytes) -> None:
        """Raise for a request that would have its provider reach the network for a rollout that has none."""
        if self.server_tools:
            return
        try:
            refuse_server_tools(dialect, body)
        except ServerToolRefused as refused:
            for name in refused.names:
                if name in self.refused_tools or len(self.refused_tools) < MAX_REFUSED:
                    self.refused_tools[name] = self.refused_tools.get(name, 0) + 1
            raise

    def check_complete(self) -> None:
        """Raise where a restart took something from it that was not supplied yet."""
        if self.missing:
            _log.warning(
                "rollout %s answers nothing since a restart: %s", self.rollout_id, "; ".join(self.missing.values())
            )
            raise SessionIncomplete(
                f"the gate was started again and this rollout lacks its {', '.join(self.missing)}; its operator can supply it",
                rollout_id=self.rollout_id,
            )

    def note_recorded(self, reply: Reply) -> None:
        """An answer out of `prefix`: the parent's, or one that the caller wrote."""
        self.replayed, self.refused = self.replayed + (REPLAYED in reply.flaws), None

    def note_answer(self) -> None:
        self.answered, self.refused = self.answered + 1, None

    def log_tail(self) -> str:
        """The last lines about this rollout, oldest first; no bodies, no keys."""
        return "\n".join(
            f"{time.strftime('%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d} {line % values if values else line}"
            for at, line, values in self._log
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that ends with the session at the latest."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.note(f"{type(error).__name__}: {error}")

    @property
    def tasks(self) -> tuple[asyncio.Task[Any], ...]:
        return (*self._tasks, *(turn.task for turn in self.turns.live if turn.task is not None))

    def model(self, requested: str | None) -> str:
        """The one model an agent may see."""
        return requested or str(self.settings.get("model") or "policy")

    def find_spent(self) -> str | None:
        """The part of the budget that is used up, or None."""
        budget = self.budget
        if budget.calls is not None and self.calls >= budget.calls:
            return "calls"
        if budget.prompt_tokens is not None and self.prompt_tokens >= budget.prompt_tokens:
            return "prompt_tokens"
        if budget.completion_tokens is not None and self.completion_tokens >= budget.completion_tokens:
            return "completion_tokens"
        if budget.wall_s is not None and time.time() - self.created_at >= budget.wall_s:
            return "wall_s"
        return None

    def charge(self, reply: Reply) -> None:
        usage = reply.usage
        self.charge_cached(usage)
        self.prompt_tokens += usage.prompt_tokens or (len(reply.prompt_ids) if reply.prompt_ids is not None else 0)
        self.completion_tokens += usage.completion_tokens or (
            len(reply.completion_ids) if reply.completion_ids is not None else 0
        )

    def charge_cached(self, usage: Usage) -> None:
        if usage.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + usage.cached_tokens

    def note_version(self, reply: Reply) -> None:
        if reply.version_start is None and not reply.spans:
            return
        known = [span.version for span in reply.spans] or [reply.version_start]
        versions = [version for version in (*known, self.oldest_version) if version is not None]
        self.oldest_version = min(versions, default=None)

    @property
    def newest_version(self) -> int | None:
        """Its policy's newest version, as far as the gate knows."""
        return self.gate.calls.newest_version(self.policy)

    @property
    def staleness(self) -> int:
        """Versions between its oldest answer and the newest there is; 0 where they are not known."""
        newest, oldest = self.newest_version, self.oldest_version
        return 0 if newest is None or oldest is None else max(0, newest - oldest)

    def record(self) -> SessionRecord:
        """The session as the log keeps it; this outlives a restart."""
        return SessionRecord(
            rollout_id=self.rollout_id,
            key_hash=self.key_hash,
            created_at=self.created_at,
            settings={
                "budget": msgspec.to_builtins(self.budget),
                "options": {k: v for k, v in self.settings.items() if k not in SECRETS},
                "metadata": dict(self.metadata),
                "held": self.held,
                "server_tools": self.server_tools,
                "own": msgspec.to_builtins(self.own),
            },
            attempt_id=self.lease.attempt.id if self.lease is not None else None,
            fence=self.lease.fence if self.lease is not None else None,
        )

    async def lock(self) -> None:
        """Revoke the key while the rollout is judged between two steps."""
        await self.gate.lock_session(self)

    async def unlock(self) -> str:
        return await self.gate.unlock_session(self)

    async def close(self) -> Trajectory:
        """Revoke the key, end what is under way, tell the policy. Nothing is committed to this rollout afterwards."""
        return await self.gate.close_session(self)
