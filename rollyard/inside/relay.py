"""The relay's end inside the sandbox: standard library only, any Python from 3.6 on, run as `python3 -c` or from a file.

It trusts its stdin (the host) and nothing that connects to it. It ends when its stdin ends, so it cannot outlive the host.
With `unix:PATH` as an argument that socket takes the place of both stdin and stdout; with `files:DIR` a pair of files in that
directory does (see filepair.py): it reads what is appended to `in`, told by the fifo `call`, and appends to `out`, telling by the
fifo `bell`. It ends when `in` is removed or `alive` was not touched for two minutes.
"""

import asyncio
import base64
import os
import struct
import sys
import time

HEAD = struct.Struct(">cII")
CREDIT = 512 * 1024
CHUNK = 64 * 1024
FREED = 16 * 2**20  # progress is reported to the host in steps
LINES = "lines" in sys.argv[1:]
SOCKET = [word for word in sys.argv[1:] if word.startswith("unix:")]  # instead of stdin and stdout
FILES = [word for word in sys.argv[1:] if word.startswith("files:")]
BEAT_S = 5
ALONE_S = 120


class RelayPeer:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.credit, self.more = CREDIT, asyncio.Event()
        self.inbox = asyncio.Queue()


class InsideRelay:
    def __init__(self, out):
        self.out = out
        self.peers = {}
        self.servers = []
        self.next_accepted = 0x80000001  # the host counts from 1
        self.tasks = set()

    def send(self, kind, stream, payload=b""):
        frame = HEAD.pack(kind, stream, len(payload)) + payload
        self.out.write(base64.b64encode(frame) + b"\n" if LINES else frame)

    def spawn(self, work):
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def take(self, kind, stream, payload):
        if kind == b"L":
            await self.listen(stream, int(payload))
        elif kind == b"D":
            self.spawn(self.dial(stream, int(payload)))
        elif stream in self.peers:
            peer = self.peers[stream]
            if kind == b"W":
                peer.credit += int(payload)
                peer.more.set()
            elif kind in (b"P", b"E", b"X"):
                peer.inbox.put_nowait((kind, payload))

    async def listen(self, listener, port):
        async def accepted(reader, writer):
            stream = self.next_accepted
            self.next_accepted += 1
            self.send(b"O", stream, str(listener).encode())
            await self.run(stream, RelayPeer(reader, writer))

        try:
            server = await asyncio.start_server(accepted, "127.0.0.1", port, limit=CHUNK)
        except OSError as error:
            self.send(b"X", listener, str(error).encode())
            return
        self.servers.append(server)
        self.send(b"B", listener, str(server.sockets[0].getsockname()[1]).encode())

    async def dial(self, stream, port):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=CHUNK)
        except OSError as error:
            self.send(b"X", stream, str(error).encode())
            return
        self.send(b"O", stream)
        await self.run(stream, RelayPeer(reader, writer))

    async def run(self, stream, peer):
        self.peers[stream] = peer
        up, down = asyncio.ensure_future(self.up(stream, peer)), asyncio.ensure_future(self.down(stream, peer))
        why = b""
        try:
            done, _ = await asyncio.wait([up, down], return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                if task.exception() is not None:
                    why = str(task.exception()).encode()
        finally:
            up.cancel()
            down.cancel()
            self.peers.pop(stream, None)
            peer.writer.close()
            self.send(b"X", stream, why)

    async def up(self, stream, peer):
        while True:
            while peer.credit <= 0:
                peer.more.clear()
                await peer.more.wait()
            data = await peer.reader.read(min(CHUNK, peer.credit))
            if not data:
                self.send(b"E", stream)
                return
            peer.credit -= len(data)
            self.send(b"P", stream, data)
            await self.out.drain()

    async def down(self, stream, peer):
        while True:
            kind, payload = await peer.inbox.get()
            if kind == b"X":
                raise ConnectionError("closed by the host")
            if kind == b"E":
                if peer.writer.can_write_eof():
                    peer.writer.write_eof()
                return
            peer.writer.write(payload)
            await peer.writer.drain()
            self.send(b"W", stream, str(len(payload)).encode())


async def frames(reader):
    try:
        while True:
            if LINES:
                line = await reader.readuntil(b"\n")
                frame = base64.b64decode(line)
                kind, stream, size = HEAD.unpack(frame[: HEAD.size])
                yield kind, stream, frame[HEAD.size :]
            else:
                kind, stream, size = HEAD.unpack(await reader.readexactly(HEAD.size))
                yield kind, stream, await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        return


class InsideFilePair:
    """A reader's feed and a writer over two files that only grow. Bells wake both sides, so neither polls."""

    def __init__(self, place, reader):
        self.place, self.reader = place, reader
        self.loop = asyncio.get_event_loop()
        self.source = os.open(os.path.join(place, "in"), os.O_RDONLY)
        self.target = os.open(os.path.join(place, "out"), os.O_WRONLY | os.O_APPEND)
        self.call = os.open(os.path.join(place, "call"), os.O_RDWR | os.O_NONBLOCK)
        self.rung = False
        self.taken = self.told = 0
        self.loop.add_reader(self.call, self.await_call)
        self.beat()

    def await_call(self):
        try:
            os.read(self.call, CHUNK)
        except BlockingIOError:
            pass
        self.look()

    def look(self):
        while True:
            data = os.read(self.source, CHUNK)
            if not data:
                break
            self.reader.feed_data(data)
            self.taken += len(data)
        if self.taken - self.told >= FREED:
            self.tell_taken()
        if not os.path.exists(os.path.join(self.place, "in")):
            self.reader.feed_eof()

    def tell_taken(self):
        """What the host may give back to the disk, in one step: a file that is whole or not there."""
        self.told = self.taken
        name = os.path.join(self.place, "taken")
        try:
            with open(name + ".new", "w") as file:
                file.write("%d\n" % self.taken)
            os.replace(name + ".new", name)
        except OSError:
            pass  # the disk is full, or the host has gone

    def beat(self):
        try:
            age = time.time() - os.stat(os.path.join(self.place, "alive")).st_mtime
        except OSError:
            age = ALONE_S + 1
        if age > ALONE_S:
            self.reader.feed_eof()
            return
        self.ring()
        self.look()
        self.loop.call_later(BEAT_S, self.beat)

    def write(self, data):
        view = memoryview(data)
        while len(view):
            view = view[os.write(self.target, view) :]
        if not self.rung:
            self.rung = True
            self.loop.call_soon(self.ring)

    def ring(self):
        self.rung = False
        try:
            bell = os.open(os.path.join(self.place, "bell"), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return  # there is no listener now; the next one looks at the file first
        try:
            os.write(bell, b"\n")
        except OSError:
            pass
        os.close(bell)

    async def drain(self):
        await asyncio.sleep(0)


async def main():
    loop = asyncio.get_event_loop()
    if FILES:
        reader = asyncio.StreamReader(limit=4 * CHUNK)
        writer = InsideFilePair(FILES[0][6:], reader)
    elif SOCKET:
        reader, writer = await asyncio.open_unix_connection(SOCKET[0][5:], limit=4 * CHUNK)
    else:
        reader = asyncio.StreamReader(limit=4 * CHUNK)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", 0))
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(1, "wb", 0))
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
    relay = InsideRelay(writer)
    relay.send(b"H", 0, b"1")
    async for frame in frames(reader):
        await relay.take(*frame)


if __name__ == "__main__":
    asyncio.get_event_loop_policy().new_event_loop().run_until_complete(main())
