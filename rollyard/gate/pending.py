"""A turn is one question to the policy; readers are the requests that wait for its answer.

Agents resend. Whether a request is a new turn or the same one again decides what is sampled and what is trained on, so the
rule is narrow: a request that says it is a retry (`Idempotency-Key` seen before, `x-stainless-retry-count` above zero), or
an identical body whose earlier reader is gone without its answer, joins that turn. Two live readers of identical bodies are
two turns (parallel sub-agents ask the same thing), and an unmarked identical request after a delivered answer is a new one
(an agent that compacts its history may ask the very same thing twice, and looping it on one answer would never end).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rollyard.core.call import Call, Dialect, Reply
from rollyard.core.errors import BadRequest
from rollyard.net.exchange import Exchange
from rollyard.trajectory.attach import Match
from rollyard.wire.codec import Codec

NO_STORE = b"cache-control: no-store\r\nx-accel-buffering: no\r\n"
TurnKey = tuple[Dialect, bytes, str]


def turn_key(dialect: Dialect, digest: bytes, model: str | None) -> TurnKey:
    """Of requests that ask the same. `digest` is the body's, in which only Gemini's do not say the model."""
    return dialect, digest, (model or "").removeprefix("models/") if dialect == "gemini" else ""


class GateRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """An error as the agent sees it. `message` is ours and generic; what really happened is in the log under `id`."""

    status: int
    code: str
    message: str
    retry_after: float | None = None
    id: str | None = None

    @property
    def text(self) -> str:
        return f"{self.message} ({self.id})" if self.id else self.message

    def headers(self) -> bytes:
        return b"" if self.retry_after is None else b"retry-after: %d\r\n" % max(1, round(self.retry_after))


class PendingReader:
    """One request waiting for a turn. The real status is held back until `status_s`; from then on a stream is open and
    kept alive, and whatever happens later is said inside it."""

    __slots__ = ("call", "codec", "exchange", "last", "opened", "since", "turn")

    def __init__(self, exchange: Exchange, codec: Codec, call: Call, now: float) -> None:
        self.exchange = exchange
        self.turn: PendingTurn | None = None
        self.codec = codec
        self.call = call
        self.since = self.last = now
        self.opened = False

    def tick(self, now: float, status_s: float, keepalive_s: float) -> None:
        if not self.call.stream or self.exchange.gone:
            return
        if not self.opened:
            if now - self.since >= status_s:
                self.opened = True
                self.last = now
                self.exchange.start(200, kind=self.codec.stream_type(self.call).encode(), extra=NO_STORE)
                self.exchange.send(self.codec.opening(self.call) or self.codec.keepalive(self.call))
        elif now - self.last >= keepalive_s:
            self.last = now
            self.exchange.send(self.codec.keepalive(self.call))

    def leave(self) -> None:
        """Its connection is gone."""
        if self.turn is not None:
            self.turn.lose_reader()

    def encode(self, reply: Reply) -> bytes:
        if self.call.stream:
            return b"".join(self.codec.stream(self.call, reply, opened=self.opened))
        return self.codec.encode(self.call, reply)

    def answer(self, reply: Reply, body: bytes | None = None) -> bool:
        """Write the answer; False when its reader is gone. `body` was encoded before the stream was opened."""
        exchange = self.exchange
        if exchange.gone:
            return False
        if body is None or self.opened:
            body = self.encode(reply)
        if self.opened:
            exchange.finish(body)
        elif self.call.stream:
            exchange.respond(200, body, kind=self.codec.stream_type(self.call).encode(), extra=NO_STORE)
        else:
            exchange.respond(200, body)
        return not exchange.gone

    def refuse(self, refusal: GateRefusal) -> None:
        if self.opened:
            self.exchange.finish(
                self.codec.stream_error(self.call, refusal.status, refusal.code, refusal.text),
            )
        else:
            body = self.codec.error(refusal.status, refusal.code, refusal.text)
            self.exchange.respond(refusal.status, body, extra=refusal.headers())


class PendingTurn:
    """One call on its way to an answer, with every request that waits for it: the first one and those that repeat it."""

    __slots__ = (
        "call",
        "committing",
        "deadline",
        "delivered",
        "expired",
        "idempotency",
        "key",
        "match",
        "orphan_at",
        "orphan_s",
        "pinned",
        "readers",
        "recorded",
        "reply",
        "task",
    )

    def __init__(
        self,
        key: TurnKey,
        call: Call | None,
        *,
        deadline: float,
        orphan_s: float = 0.0,
        idempotency: str | None = None,
        match: Match | None = None,
        recorded: Reply | None = None,
        pinned: bool = False,
    ) -> None:
        self.key = key
        self.recorded = recorded  # the parent's answer to it, where it lies before a branch point
        self.pinned = pinned  # its messages are the parent's, and its body is not
        self.orphan_s = orphan_s  # how long it goes on with no reader
        self.call = call  # let go once answered: a reader that comes back brings its own
        self.match = match  # what its call goes on from; let go as well
        self.idempotency = idempotency
        self.readers: Sequence[PendingReader] = ()
        self.reply: Reply | None = None
        self.delivered = False
        self.committing: float | None = None  # by when its commit must be done
        self.expired = False
        self.deadline = deadline
        self.orphan_at: float | None = None
        self.task: asyncio.Task[Any] | None = None

    @property
    def abandoned(self) -> bool:
        """No reader waits for it and none got its answer."""
        return not self.delivered and all(reader.exchange.gone for reader in self.readers)

    def join(self, reader: PendingReader) -> None:
        if self.reply is not None:
            self.delivered = reader.answer(self.reply) or self.delivered
            return
        self.readers = (*self.readers, reader)
        reader.turn = self
        reader.exchange.left = reader.leave
        self.orphan_at = None

    def lose_reader(self) -> None:
        if self.reply is None and self.abandoned:
            self.orphan_at = time.monotonic() + self.orphan_s
            if self.orphan_s <= 0.0:
                self.give_up()

    def tick(self, now: float, status_s: float, keepalive_s: float) -> None:
        for reader in self.readers:
            reader.tick(now, status_s, keepalive_s)
        if self.committing is not None:
            if now > self.committing and self.task is not None:
                self.expired = True
                self.task.cancel()
        elif now > self.deadline:
            self.expired = True
            self.give_up()
        elif self.orphan_at is not None and now > self.orphan_at:
            self.give_up()

    def give_up(self) -> None:
        """Stop waiting for the policy. What is being committed is never interrupted."""
        if self.task is not None and self.committing is None:
            self.task.cancel()

    def answer(self, reply: Reply, body: bytes | None, first: PendingReader | None) -> None:
        self.reply = reply
        readers, self.readers = self.readers, ()
        self.call = self.match = self.task = None
        for reader in readers:
            if reader.answer(reply, body if reader is first else None):
                self.delivered = True

    def refuse(self, refusal: GateRefusal) -> None:
        readers, self.readers = self.readers, ()
        self.call = self.match = self.task = None
        for reader in readers:
            reader.refuse(refusal)


class Turns:
    """The turns of one rollout that a request may still join: those under way, and the last answered ones."""

    def __init__(self, keep: int) -> None:
        self.live: set[PendingTurn] = set()
        self._keep = keep
        self._by_key: dict[TurnKey, list[PendingTurn]] = {}
        self._by_mark: dict[str, PendingTurn] = {}
        self._done: dict[PendingTurn, None] = {}  # the oldest first

    def find(self, key: TurnKey, idempotency: str | None, retried: bool) -> PendingTurn | None:
        if idempotency is not None and (marked := self._by_mark.get(idempotency)) is not None:
            if marked.key != key:
                raise BadRequest("this idempotency key was used for another request")
            return marked
        same = self._by_key.get(key)
        if not same:
            return None
        for turn in reversed(same):
            if turn.abandoned:
                return turn
        return same[-1] if retried else None

    def begin(self, turn: PendingTurn) -> None:
        self.live.add(turn)
        self._index(turn)

    def restore(self, turn: PendingTurn) -> None:
        self._index(turn)
        self._retire(turn)

    def finish(self, turn: PendingTurn) -> None:
        self.live.discard(turn)
        self._retire(turn)

    def fail(self, turn: PendingTurn) -> None:
        """A failed turn is not joined: a retry of it asks again."""
        self.live.discard(turn)
        self._drop(turn)

    def _index(self, turn: PendingTurn) -> None:
        self._by_key.setdefault(turn.key, []).append(turn)
        if turn.idempotency is not None:
            self._by_mark[turn.idempotency] = turn

    def _retire(self, turn: PendingTurn) -> None:
        self._done[turn] = None
        if len(self._done) > self._keep:
            self._drop(next(iter(self._done)))

    def _drop(self, turn: PendingTurn) -> None:
        self._done.pop(turn, None)
        same = self._by_key.get(turn.key)
        if same == [turn]:
            del self._by_key[turn.key]
        elif same is not None and turn in same:
            same.remove(turn)
        if turn.idempotency is not None and self._by_mark.get(turn.idempotency) is turn:
            del self._by_mark[turn.idempotency]
