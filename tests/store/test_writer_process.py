"""Several processes, one that writes: what was answered is kept, what was not is found out, whenever that one dies.

The test is the writing process in some of these: it takes links from the inbox and answers, or does not.
"""

import asyncio
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text

from rollyard.core.call import Call, Reply
from rollyard.core.errors import LeaseLost, MissingExtra, SessionClosed, StoreError
from rollyard.core.message import Message, Text
from rollyard.core.protocols import SessionRecord
from rollyard.store import Store
from rollyard.store.migrate import bring_up_to_date
from rollyard.store.sqlite_writer import SQLiteWriter
from rollyard.store.writer_process import serve_writes
from rollyard.trajectory.trajectory import Trajectory
from tests.store.conftest import sent_to_a_writer

pytestmark = pytest.mark.anyio


class Inbox:
    """Where links arrive, and the writer that the test is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inbox, self.outbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.outbox.setblocking(False)
        self.writer = SQLiteWriter(path, set_up=partial(bring_up_to_date, where=str(path)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.writer.close()
        self.inbox.close()
        self.outbox.close()

    async def accept(self) -> socket.socket:
        self.inbox.setblocking(False)
        while True:
            try:
                (descriptor,) = socket.recv_fds(self.inbox, 16, 1)[1]
                link = socket.socket(fileno=descriptor)
                link.setblocking(False)
                return link
            except BlockingIOError:
                await asyncio.sleep(0.001)

    async def serve(self) -> None:
        self.inbox.setblocking(False)
        await serve_writes(self.path, self.inbox, asyncio.Event(), lambda: None)

    @asynccontextmanager
    async def serving(self):
        """A real one from here on."""
        task = asyncio.create_task(self.serve())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def read_works(link: socket.socket) -> list:
    async def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = await asyncio.get_running_loop().sock_recv(link, count - len(data))
            assert more
            data += more
        return data

    return pickle.loads(await exactly(struct.unpack("<Q", await exactly(8))[0]))


async def answer(link: socket.socket, results: list) -> None:
    packed = pickle.dumps(results)
    await asyncio.get_running_loop().sock_sendall(link, struct.pack("<Q", len(packed)) + packed)


def a_call(trajectory: Trajectory, number: int):
    words = (Message("user", (Text(f"question {number}"),)),)
    call = Call(
        id=f"{trajectory.rollout_id}-{number}",
        rollout_id=trajectory.rollout_id,
        dialect="chat",
        model="m",
        messages=words,
        raw=b"body %d" % number,
    )
    added = trajectory.add(call, Reply(message=Message("assistant", (Text(f"answer {number}"),))))
    return added.record, added.nodes, added.blobs


async def kept(path: Path, rollout_id: str) -> list[str]:
    async with Store.open(path, create=False) as store:
        records, _ = await store.load_calls(rollout_id)
    return [record.id for record in records]


async def test_a_call_whose_answer_was_lost_is_kept_once_and_its_caller_hears_that_it_is(tmp_path):
    with Inbox(tmp_path / "runs.db") as here:
        async with Store.open(here.path, writer=here.outbox) as store:
            writing = asyncio.create_task(store.commit(*a_call(Trajectory("r"), 0)))
            with await here.accept() as link:
                assert here.writer.run(await read_works(link)) == [None]
            assert not writing.done(), "it waits for an answer"
            async with here.serving():
                await writing
    assert await kept(here.path, "r") == ["r-0"]


async def test_a_call_that_a_dead_writer_never_wrote_is_written_by_the_next(tmp_path):
    with Inbox(tmp_path / "runs.db") as here:
        async with Store.open(here.path, writer=here.outbox) as store:
            trajectory = Trajectory("r")
            writing = [asyncio.create_task(store.commit(*a_call(trajectory, n))) for n in range(3)]
            with await here.accept() as link:
                assert len(await read_works(link)) == 3
            for _ in range(5):  # the next ones die at once, or in the middle of reading
                (await here.accept()).close()
                with await here.accept() as link:
                    assert await asyncio.get_running_loop().sock_recv(link, 5)
            later = asyncio.create_task(store.commit(*a_call(trajectory, 3)))
            assert not any(one.done() for one in writing)
            async with here.serving():
                await asyncio.gather(*writing, later)
    assert await kept(here.path, "r") == ["r-0", "r-1", "r-2", "r-3"]


async def test_a_call_that_was_kept_is_no_refusal_when_its_session_has_closed_since(tmp_path):
    with Inbox(tmp_path / "runs.db") as here:
        async with Store.open(here.path, writer=here.outbox) as store:
            trajectory = Trajectory("r")
            writing = [asyncio.create_task(store.commit(*a_call(trajectory, n))) for n in range(2)]
            with await here.accept() as link:
                first, _ = await read_works(link)
                session = SessionRecord(rollout_id="r", key_hash=b"k", created_at=1.0, closed_at=2.0, settings={})
                async with Store.open(here.path) as other:
                    here.writer.run([first])
                    await other.save_session(session)
            async with here.serving():
                assert await writing[0] is None
                with pytest.raises(SessionClosed, match="rollout r is closed") as refused:
                    await writing[1]
                assert refused.value.rollout_id == "r"
    assert await kept(here.path, "r") == ["r-0"]


async def test_another_call_under_the_same_number_is_still_refused(tmp_path):
    """That a number is taken does not say that this call took it."""
    with Inbox(tmp_path / "runs.db") as here:
        async with Store.open(here.path, writer=here.outbox) as store:
            writing = asyncio.create_task(store.commit(*a_call(Trajectory("r"), 0)))
            with await here.accept() as link:
                await read_works(link)
                async with Store.open(here.path) as other:
                    await other.commit(*a_call(Trajectory("r"), 5))
            async with here.serving():
                with pytest.raises(StoreError, match="UNIQUE"):
                    await writing
    assert await kept(here.path, "r") == ["r-5"]


async def test_what_may_not_happen_twice_fails_when_the_writer_dies(tmp_path):
    with Inbox(tmp_path / "runs.db") as here:
        async with Store.open(here.path, writer=here.outbox) as store:
            blob, call = (
                asyncio.create_task(store.put_blob(b"x")),
                asyncio.create_task(store.commit(*a_call(Trajectory("r"), 0))),
            )
            with await here.accept() as link:
                assert len(await read_works(link)) == 2
            with pytest.raises(StoreError, match=r"runs\.db died: whether this was written is not known"):
                await blob
            async with here.serving():
                await call
                assert await store.put_blob(b"x") == await store.put_blob(b"x")


async def test_a_caller_that_gave_up_keeps_no_other_waiting_when_the_writer_dies(tmp_path):
    with Inbox(tmp_path / "runs.db") as here:
        async with Store.open(here.path, writer=here.outbox) as store:
            works = (store.put_blob(b"x"), store.commit(*a_call(Trajectory("r"), 0)))
            blob, call = map(asyncio.create_task, works)
            with await here.accept() as link:
                assert len(await read_works(link)) == 2
                blob.cancel()
                await asyncio.wait([blob])
            async with here.serving(), asyncio.timeout(60):
                await call


async def test_a_store_that_is_closed_has_written_all_that_it_was_given(tmp_path):
    path = tmp_path / "runs.db"
    async with sent_to_a_writer(path) as writer:
        async with Store.open(path, writer=writer) as store:
            large = asyncio.create_task(store.database.write(Large()))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert large.done() and large.result()
        async with Store.open(path, writer=writer) as store:
            call = asyncio.create_task(store.commit(*a_call(Trajectory("r"), 0)))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert call.done() and call.result() is None


async def test_each_caller_gets_its_own_answer_however_many_wait(tmp_path):
    with Inbox(tmp_path / "runs.db") as here:
        async with Store.open(here.path, writer=here.outbox) as store:
            calls = []
            for number in range(5):
                calls.append(asyncio.create_task(store.database.write(partial(_echo, word=f"{number}"))))
                await asyncio.sleep(0.03)  # past what is gathered: a batch each
            with await here.accept() as link:
                batches = [await read_works(link) for _ in range(5)]
                assert [len(works) for works in batches] == [1] * 5
                packed = b"".join(_frame(here.writer.run(works)) for works in batches)
                for start in range(0, len(packed), 7):  # in pieces
                    await asyncio.get_running_loop().sock_sendall(link, packed[start : start + 7])
                assert await asyncio.gather(*calls) == ["0", "1", "2", "3", "4"]


def _frame(value) -> bytes:
    packed = pickle.dumps(value)
    return struct.pack("<Q", len(packed)) + packed


def _echo(connection, word: str) -> str:
    return connection.execute(text("SELECT :word"), {"word": word}).scalar()


def _lose_lease(connection) -> None:
    raise LeaseLost("the claim of rollout r is lost", rollout_id="r", hint="start over")


def _lack(connection) -> None:
    raise MissingExtra("torch", "train", why="this")


async def test_refusals_come_back_as_they_were_raised_and_only_to_their_callers(tmp_path):
    async with (
        sent_to_a_writer(tmp_path / "runs.db") as writer,
        Store.open(tmp_path / "runs.db", writer=writer) as store,
    ):
        works = (_lose_lease, _lack, partial(_echo, word="a"), lambda _: None, _divide, partial(_echo, word="b"))
        lost, lacking, a, local, broken, b = await asyncio.gather(
            *map(store.database.write, works), return_exceptions=True
        )
        assert type(lost) is LeaseLost
        assert (lost.message, lost.rollout_id, lost.hint) == ("the claim of rollout r is lost", "r", "start over")
        assert type(lacking) is MissingExtra and lacking.extra == "train" and "pip install" in str(lacking)
        assert (a, b) == ("a", "b")
        assert type(local) is StoreError and "pickle" in str(local)
        assert type(broken) is StoreError and "ZeroDivisionError" in str(broken)


def _divide(connection) -> None:
    raise ZeroDivisionError("division by zero")


class Large:
    """A work that takes a while to encode."""

    large, prepared_by = True, ""

    def prepare(self) -> None:
        self.prepared_by = self.prepared_by or threading.current_thread().name

    def __call__(self, connection) -> str:
        return self.prepared_by


async def test_what_takes_long_to_encode_does_not_stop_the_loop(tmp_path):
    async with (
        sent_to_a_writer(tmp_path / "runs.db") as writer,
        Store.open(tmp_path / "runs.db", writer=writer) as store,
    ):
        assert await store.database.write(Large()) != threading.current_thread().name
        body = b"0123456789" * 200_000
        record, nodes, _ = a_call(Trajectory("r"), 0)
        await store.commit(record, nodes, {b"d" * 32: body})
        assert await store.load_blob(b"d" * 32, "r") == body


async def test_without_a_program_around_it_a_link_fails_at_once(tmp_path):
    with Inbox(tmp_path / "runs.db") as here:
        here.inbox.close()
        async with Store.open(here.path, writer=here.outbox) as store:
            with pytest.raises(StoreError, match="cannot be reached"):
                await store.put_blob(b"x")


async def test_a_new_file_is_made_with_the_first_write_and_read_as_empty_before(tmp_path):
    path = tmp_path / "runs.db"
    async with sent_to_a_writer(path) as writer, Store.open(path, writer=writer) as one:
        async with Store.open(path, writer=writer) as other:
            assert await one.list_runs() == [] and await other.sessions() == []
            assert not path.exists()
            digest = await one.put_blob(b"x")
            assert await other.get_blob(digest) == b"x"
    assert path.stat().st_mode & 0o777 == 0o600


async def test_calls_of_several_clients_survive_a_writer_that_is_killed_again_and_again(tmp_path):
    path, written = tmp_path / "runs.db", {f"r{n}": 0 for n in range(6)}
    with Inbox(path) as here:
        over = asyncio.Event()

        async def client() -> None:
            async with Store.open(path, writer=here.outbox) as store:
                own = [asyncio.create_task(rollout(store, name)) for name in names.pop()]
                await asyncio.gather(*own)

        async def rollout(store: Store, name: str) -> None:
            trajectory = Trajectory(name)
            while not over.is_set():
                await store.commit(*a_call(trajectory, written[name]))
                written[name] += 1

        names = [["r0", "r1", "r2"], ["r3", "r4", "r5"]]
        with Services(here) as services:
            pid = services.start()
            clients = [asyncio.create_task(client()) for _ in range(2)]
            for _ in range(12):
                before = sum(written.values())
                while sum(written.values()) < before + 40:
                    assert not any(one.done() for one in clients), [one.exception() for one in clients if one.done()]
                    await asyncio.sleep(0.005)
                await asyncio.sleep(random.random() / 100)
                os.kill(pid, signal.SIGKILL)
                pid = services.start()
            over.set()
            await asyncio.gather(*clients)
    for name, count in written.items():
        assert await kept(path, name) == [f"{name}-{n}" for n in range(count)]


class Services:
    """Processes that write, one at a time."""

    def __init__(self, here: Inbox) -> None:
        here.inbox.setblocking(False)
        number = here.inbox.fileno()
        command = [sys.executable, str(Path(__file__).with_name("killed_service.py")), str(number)]
        pipe = subprocess.PIPE
        self._path = here.path
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[number])

    def start(self) -> int:
        """After the last one was killed."""
        self._process.stdin.write(f"{self._path}\n".encode())
        self._process.stdin.flush()
        self._last = int(self._process.stdout.readline())
        return self._last

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        os.kill(self._last, signal.SIGKILL)
        self._process.wait(60)
        self._process.stdout.close()


async def test_what_is_written_reaches_the_file_while_the_writer_runs(tmp_path):
    """The log would be as long as all that was ever written."""
    path = tmp_path / "runs.db"
    async with sent_to_a_writer(path) as writer, Store.open(path, writer=writer) as store:
        for _ in range(8):
            await store.put_blob(os.urandom(2**19))
        async with asyncio.timeout(60):
            while path.stat().st_size < 2**22:
                await asyncio.sleep(0.02)
