"""`Gate`: the model endpoint that agents talk to. Sessions and keys, listeners, one clock; the path of a call is `calls`.

One gate serves thousands of rollouts on one loop. It has no server object per listener: each sandbox's listening socket is
given to the loop with a `GateListener`, and all connections share one tick. Without `host` or `unix` it listens nowhere itself;
agents reach it through the listeners of their sandboxes. Which of the three modes a rollout runs in is its policy's nature:
there is no mode here.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from rollyard.core.errors import CannotListen, ConfigError, Error, GateUnreachable, StoreError
from rollyard.core.lease import Lease
from rollyard.core.log import Log
from rollyard.core.protocols import CallLog, Listener, Passthrough, Policy, Prefix, SessionRecord
from rollyard.gate.calls import Calls
from rollyard.gate.keys import KeyRing, check_key, key_hash, new_key
from rollyard.gate.limits import Budget, GateLimits, Tls
from rollyard.gate.listener import GateListener, accept
from rollyard.gate.metrics import GateCounters
from rollyard.gate.processes import CLIENT, SIBLING, UNIX_CLIENT, GateProcess
from rollyard.gate.session import Session, SessionPlan
from rollyard.gate.session_parts import (
    OwnParts,
    changed_tools,
    describe_parts,
    describe_policy,
    list_tools,
    missing_parts,
)
from rollyard.net.asgi import App, Mounted
from rollyard.net.binding import LOOPBACK, http_url, listen_unix
from rollyard.net.movable_connection import Received, adopt_connection
from rollyard.net.web_pages import AllowedHosts
from rollyard.trajectory.trajectory import Trajectory

_log = Log("rollyard.gate")


class Gate:
    """Sessions of rollouts and the listeners that their agents reach. `policy` answers the sessions that bring none of their own;
    `log` makes their calls durable."""

    def __init__(
        self,
        policy: Policy,
        *,
        log: CallLog | None = None,
        host: str | None = None,
        port: int = 0,
        tls: Tls | None = None,
        unix: str | None = None,
        admin_key: str | None = None,
        trainer_key: str | None = None,
        limits: GateLimits = GateLimits(),  # noqa: B008 - frozen
        reopen: Callable[[str], Policy] | None = None,
        process: GateProcess | None = None,
    ) -> None:
        """`reopen` (`rollyard.policy.parse`) makes the own policies of sessions in `log` again, from their texts. `process` is
        its place among several that serve one port; `serve gate --processes` starts those."""
        if host == "":
            raise ConfigError("host must name an address", hint='"127.0.0.1", or None to listen only in sandboxes')
        self.policy = policy
        self.limits = limits
        self.admin_key = check_key("admin_key", admin_key)
        self.trainer_key = check_key("trainer_key", trainer_key)
        if admin_key is not None and admin_key == trainer_key:
            raise ConfigError(
                "admin_key and trainer_key must differ", hint="the operator and the trainer have a key each"
            )
        self.sessions: dict[str, Session] = {}
        self.counters = GateCounters()
        self.calls = Calls(log, limits, self.counters)
        self.url: str | None = None
        self._log = log
        self._reopen = reopen
        self._reopened: dict[str, Policy] = {}  # by text; the gate made them, the gate closes them
        self._host, self._port, self._tls, self._unix = host, port, tls, unix
        self.process = process
        self._keys: KeyRing[Session] = KeyRing(limits.closed_keys)
        self._listeners: set[GateListener] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._operator: tuple[App, App] | None = None
        self._running = False

    # -- lifetime

    async def __aenter__(self) -> Self:
        self._running = True
        if self.process is not None and self.process.again:
            self.calls.fair_queue.pause()  # until the others have said what the trainer wants
        try:
            await self._restore()
            if self._host is not None:
                await self._listen(self._host)
            if self._unix is not None:
                await self._listen_unix(self._unix)
            if self.process is not None:
                await self._join_siblings(self.process)
        except BaseException:  # cancelled too: a gate that did not open leaves no listener
            await self.aclose()
            raise
        self._tick()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop serving. Sessions stay open in the log: a gate started again on it goes on with them. The policy is not
        closed: its maker does that."""
        if not self._running:
            return
        self._running = False
        if self._ticker is not None:
            self._ticker.cancel()
        if self.process is not None:
            self.process.close()
        for gate_listener in tuple(self._listeners):
            await self._shut(gate_listener, at_once=True)
        for session in tuple(self.sessions.values()):
            session.closing = True
            await self._end_tasks(session)
            if session.tools is not None:
                await session.tools.aclose()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.limits.close_s)
        for policy in self._reopened.values():
            await policy.aclose()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tick(self) -> None:
        now = time.monotonic()
        self.calls.tick(now)
        for gate_listener in tuple(self._listeners):
            gate_listener.tick(now)
        self._ticker = asyncio.get_running_loop().call_later(self.limits.tick_s, self._tick)

    # -- listeners

    async def _listen(self, host: str) -> None:
        if host not in LOOPBACK:
            _log.warning("the gate listens beyond loopback: %s, %s TLS", host, "with" if self._tls else "without")
        process, loop = self.process, asyncio.get_running_loop()
        gate_listener = GateListener(self, operator=True, hosts=AllowedHosts(host), label=CLIENT)
        secured = _context(self._tls)
        try:
            if process is not None:
                server = await loop.create_server(gate_listener.connection, sock=process.listener, backlog=1024)
            else:
                server = await loop.create_server(
                    gate_listener.connection,
                    host,
                    self._port,
                    ssl=secured,
                    backlog=1024,
                    reuse_address=True,
                )
        except OSError as error:
            raise CannotListen(host, self._port, error) from error
        self._open(gate_listener, server)
        port = server.sockets[0].getsockname()[1]
        self.url = http_url(host, port, secure=self._tls is not None)

    async def _listen_unix(self, path: str) -> None:
        process = self.process
        gate_listener = GateListener(self, operator=True, label=UNIX_CLIENT)
        listener = listen_unix(path) if process is None else process.unix_listener
        server = await asyncio.get_running_loop().create_unix_server(
            gate_listener.connection, sock=listener, backlog=1024
        )
        self._open(gate_listener, server)

    async def _join_siblings(self, process: GateProcess) -> None:
        """Take what the others send, what they sent to the process before this one included."""
        self._listeners.add(GateListener(self, operator=True, label=SIBLING))
        adopters = {gate_listener.label: gate_listener for gate_listener in self._listeners}

        def adopt(received: Received) -> None:
            gate_listener = adopters[received.label]
            self.spawn(adopt_connection(received, lambda: gate_listener.connection(received.first)))

        process.listen(adopt)
        if process.again:
            from rollyard.gate.joined_operator import catch_up

            await catch_up(self, process)

    def _open(self, gate_listener: GateListener, server: asyncio.AbstractServer) -> None:
        async def stop() -> None:
            server.close()

        gate_listener.closing = stop
        self._listeners.add(gate_listener)

    async def serve(self, listener: Listener, session: Session | None = None) -> None:
        """Serve agents on a sandbox's listener until the session (or the gate) closes. With `session`, no other rollout's
        key works there. The operator's API is never served on it."""
        if not self._running:
            raise GateUnreachable("the gate is not running", hint="enter it first: async with Gate(...)")
        gate_listener = GateListener(self, session=session, capacity=self.limits.connections)
        if listener.sock is not None:
            server = await asyncio.get_running_loop().create_server(
                gate_listener.connection, sock=listener.sock, backlog=self.limits.connections
            )
            self._open(gate_listener, server)
        else:
            task = asyncio.get_running_loop().create_task(accept(gate_listener, listener))

            async def stop() -> None:
                task.cancel()
                await asyncio.wait([task], timeout=self.limits.close_s)

            gate_listener.closing = stop
            self._listeners.add(gate_listener)
        if session is not None:
            session.listeners.add(gate_listener)

    async def _shut(self, gate_listener: GateListener, *, at_once: bool = False) -> None:
        self._listeners.discard(gate_listener)
        await gate_listener.aclose()
        if at_once:
            for connection in tuple(gate_listener.connections):
                connection.abort()

    def check(self, session: Session) -> None:
        """Raise unless an agent of this session could be answered: before an agent starts, this and one request from
        inside its sandbox (`GET /v1/models`, then `session.reached`) prove that its calls will arrive."""
        if not self._running:
            raise GateUnreachable("the gate is not running", rollout_id=session.rollout_id)
        if session.closed or session.closing:
            raise GateUnreachable("the gate has closed this rollout", rollout_id=session.rollout_id)
        if session.broken is not None:
            raise GateUnreachable("the gate cannot record calls of this rollout", rollout_id=session.rollout_id)
        if not session.listeners and self.url is None and self._unix is None:
            raise GateUnreachable(
                "the gate listens nowhere that this rollout could reach",
                hint="serve a sandbox's listener, or give the gate a host",
                rollout_id=session.rollout_id,
            )

    # -- sessions

    async def open_session(
        self,
        rollout_id: str,
        *,
        policy: Policy | None = None,
        budget: Budget = Budget(),  # noqa: B008 - frozen
        settings: Mapping[str, Any] = {},
        metadata: Mapping[str, Any] = {},
        tools: Mounted | None = None,
        held: bool = False,
        lease: Lease | None = None,
        server_tools: bool = True,
        prefix: Prefix | None = None,
    ) -> Session:
        """A key for one rollout. `settings` reach the policy as `Call.options`. `tools` is an ASGI application served to
        this rollout at `/mcp` (`rollyard.tools.Toolset`). `held` says that a trainer answers: a call whose reader leaves is
        then taken back from the trainer at once. `lease` is the claim it works under: the log takes nothing once that is
        another's. Without `server_tools` a request for what the provider would run or fetch itself is refused. `prefix`
        answers the calls before a branch point."""
        if not rollout_id or "/" in rollout_id or rollout_id != rollout_id.strip():
            raise ConfigError(f"a rollout id must be a plain word, got {rollout_id!r}")
        if rollout_id in self.sessions:
            raise ConfigError(f"rollout {rollout_id} has a session already", hint="close it first")
        answers = policy if policy is not None else self.policy
        plan = SessionPlan(
            policy=answers,
            budget=budget,
            settings=settings,
            metadata=metadata,
            tools=tools,
            held=held or hasattr(answers, "take"),
            lease=lease,
            server_tools=server_tools,
            prefix=prefix,
        )
        own = describe_parts(None if answers is self.policy else answers, tools, prefix, settings)
        session = Session(self, rollout_id, plan, key=new_key(rollout_id), own=own)
        self.sessions[rollout_id] = session
        saving = None if self._log is None else asyncio.ensure_future(self._log.save_session(session.record()))
        try:
            if saving is not None:
                async with asyncio.timeout(self.limits.commit_s):
                    await asyncio.shield(saving)
            if prefix is not None:
                await self.calls.preload(session, prefix.history(rollout_id))
        except BaseException:  # cancelled too: no caller has the session, so it must not stay open
            del self.sessions[rollout_id]
            if saving is not None:
                await self._withdraw(session, saving)
            raise
        self._keys.add(session)
        return session

    async def _withdraw(self, session: Session, saving: asyncio.Future[None]) -> None:
        """Close it in the log as well, if the log has it: what was being saved when its caller was cancelled may be kept."""
        with anyio.move_on_after(self.limits.close_s, shield=True):
            try:
                await saving
                await self._tell_closed(session)
            except Exception as error:  # noqa: BLE001 - what the caller is told is why the session is not opened
                _log.debug("session %s was not closed in the log: %s", session.rollout_id, error)

    async def lock_session(self, session: Session) -> None:
        """Between two steps of one rollout: the key is revoked and what is under way ends, but the trajectory goes on."""
        self._keys.revoke(session.key_hash)
        session.key = None
        await self._end_tasks(session)

    async def unlock_session(self, session: Session) -> str:
        """A fresh key for the next step; every earlier one stays dead."""
        if session.closing:
            raise ConfigError(f"rollout {session.rollout_id} is over; its session cannot be opened again")
        session.key = new_key(session.rollout_id)
        session.key_hash = key_hash(session.key)
        if self._log is not None:
            async with asyncio.timeout(self.limits.commit_s):
                await self._log.save_session(session.record())
        self._keys.add(session)
        return session.key

    async def close_session(self, session: Session) -> Trajectory:
        """Once closed it stays closed; calling again gives the same trajectory. Where the log could not take it, calling again
        tells it once more."""
        if session.closing:
            if session.close_untold:
                await self._tell_closed(session)
            return session.trajectory
        session.closing = True
        self._keys.revoke(session.key_hash)
        await self._end_tasks(session)
        session.closed = True
        self.sessions.pop(session.rollout_id, None)
        for gate_listener in tuple(session.listeners):
            await self._shut(gate_listener)
        session.listeners.clear()
        if session.tools is not None:
            await session.tools.aclose()
        session.close_untold = self._log is not None
        async with asyncio.timeout(self.limits.close_s):
            await session.policy.closed(session.rollout_id)
        await self._tell_closed(session)
        return session.trajectory

    async def _tell_closed(self, session: Session) -> None:
        if self._log is None:
            return
        try:
            async with asyncio.timeout(self.limits.commit_s):
                await self._log.close_session(session.rollout_id, time.time())
        except TimeoutError as late:
            raise StoreError("the call log did not answer in time", rollout_id=session.rollout_id) from late
        session.close_untold = False

    async def _end_tasks(self, session: Session) -> None:
        """Cancel what waits, let what is being committed finish, and be done within `close_s`."""
        for turn in tuple(session.turns.live):
            turn.give_up()
        committing = {turn.task for turn in session.turns.live if turn.committing is not None}
        tasks = session.tasks
        for task in tasks:
            if task not in committing:
                task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.limits.close_s)
            for task in late:
                task.cancel()

    def session_of(self, key: str) -> Session:
        return self._keys.session(key)

    async def _restore(self) -> None:
        if self._log is None:
            return
        async with asyncio.timeout(self.limits.commit_s):
            kept = await self._log.sessions()
        process = self.process
        for record in kept:
            if process is not None and process.owner(record.rollout_id) != process.index:
                continue
            if record.closed_at is not None:
                self._keys.revoke(record.key_hash)
            else:
                session = self._restore_session(record)
                self.sessions[record.rollout_id] = session
                self._keys.add(session)

    def _restore_session(self, record: SessionRecord) -> Session:
        own = msgspec.convert(record.settings.get("own", {}), OwnParts)
        missing = missing_parts(own)
        policy = self.policy
        if own.policy is not None:
            try:
                policy = self._open_again(own.policy)
            except Error as error:
                missing["policy"] = f"its policy {own.policy} could not be opened again ({error}); supply policy="
        plan = SessionPlan(
            policy=policy,
            budget=msgspec.convert(record.settings.get("budget", {}), Budget),
            settings=record.settings.get("options", {}),
            metadata=record.settings.get("metadata", {}),
            held=bool(record.settings.get("held", False)),
            server_tools=bool(record.settings.get("server_tools", True)),
        )
        session = Session(self, record.rollout_id, plan, hashed=record.key_hash, created_at=record.created_at, own=own)
        session.restored, session.missing = True, missing
        for why in missing.values():
            session.note(f"after a restart: {why}")
        return session

    def _open_again(self, text: str) -> Policy:
        if text not in self._reopened:
            if self._reopen is None:
                raise ConfigError("this gate opens no policies", hint="give it reopen=")
            self._reopened[text] = self._reopen(text)
        return self._reopened[text]

    def supply(
        self,
        rollout_id: str,
        *,
        policy: Policy | None = None,
        tools: Mounted | None = None,
        api_key: str | None = None,
    ) -> Session:
        """Give a session back what a restart took from it and no log can keep; `Session.missing` names it. What it does not
        lack is refused, and so are tools that the agent was described otherwise."""
        session = self.sessions.get(rollout_id)
        if session is None:
            raise ConfigError(f"no open session of rollout {rollout_id}")
        given = {name for name, one in (("policy", policy), ("tools", tools), ("api_key", api_key)) if one is not None}
        if surplus := sorted(given - session.missing.keys()):
            raise ConfigError(f"rollout {rollout_id} lacks no {', '.join(surplus)}")
        if tools is not None and (changed := changed_tools(session.own, list_tools(tools))):
            raise ConfigError(
                f"these tools are not those of rollout {rollout_id} before the restart: {', '.join(changed)}"
            )
        if policy is not None:
            session.policy = policy
            session.through = policy if isinstance(policy, Passthrough) else None
            now = describe_policy(policy)
            session.own = msgspec.structs.replace(session.own, policy=now.policy, policy_class=now.policy_class)
        if tools is not None:
            session.tools = tools
        if api_key is not None:
            session.settings = {**session.settings, "api_key": api_key}
        for name in given:
            del session.missing[name]
        return session

    # -- what the operator sees

    @property
    def in_flight(self) -> int:
        return self.calls.in_flight

    @property
    def waiting(self) -> int:
        return self.calls.fair_queue.waiting

    @property
    def connections(self) -> int:
        return sum(
            len(gate_listener.connections) for gate_listener in self._listeners if gate_listener.label != SIBLING
        )

    def operator_app(self, *, alone: bool) -> App:
        """The admin and trainer API, made on first use; `alone` of this process, where the gate has several."""
        if self._operator is None:
            self._operator = self._make_operator()
        return self._operator[alone]

    def _make_operator(self) -> tuple[App, App]:
        from rollyard.gate.admin import operator_app

        own: Any = operator_app(self, self._log)
        if self.process is None:
            return own, own
        from rollyard.gate.joined_operator import joined_app, sibling_app

        joined: Any = joined_app(self, self.process, own)
        sibling: Any = sibling_app(self, self.process, own)
        return joined, sibling


def _context(tls: Tls | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{tls.cert} and {tls.key} are no certificate with its key", hint="both in PEM, and one of the other"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {tls.cert} or {tls.key}: {error.strerror}") from error
    return context
