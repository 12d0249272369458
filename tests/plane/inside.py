"""A server that runs inside instances, on the standard library alone: it echoes what reaches it, streams events and speaks
just enough WebSocket."""

import asyncio
import base64
import hashlib
import json
import sys

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


async def body_of(headers, reader):
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int(await reader.readline(), 16):
            parts.append(await reader.readexactly(size))
            await reader.readline()
        return b"".join(parts)
    return await reader.readexactly(int(headers.get("content-length", 0)))


async def served(reader, writer):
    try:
        method, target, _ = (await reader.readline()).decode().split()
        headers = {}
        while line := (await reader.readline()).strip().decode():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        path = target.partition("?")[0]
        if path == "/socket" and "sec-websocket-key" in headers:
            await socket(headers, reader, writer)
        elif path == "/events":
            await events(target, writer)
        elif path == "/away":
            writer.write(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")
        elif path == "/broken":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        elif path == "/until-the-end":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\nwhole")
        elif path == "/noise":
            writer.write(b"\x00\xff not HTTP at all\r\n\r\n")
        else:
            await echo(method, target, headers, reader, writer)
        await writer.drain()
    finally:
        writer.close()


async def echo(method, target, headers, reader, writer):
    body = await body_of(headers, reader)
    said = {"method": method, "target": target, "headers": headers}
    said |= {"size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    data = json.dumps(said).encode()
    lines = [b"HTTP/1.1 200 OK", b"Content-Type: application/json", b"Content-Length: %d" % len(data)]
    lines += [b"Set-Cookie: a=b; Path=/; Domain=evil.example", b"Connection: close", b"", b""]
    writer.write(b"\r\n".join(lines) + (b"" if method == "HEAD" else data))


async def events(target, writer):
    pause = float(target.partition("pause=")[2] or 0.05)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for number in range(3):
        event = b"data: %d\n\n" % number
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()
        await asyncio.sleep(pause)
    writer.write(b"0\r\n\r\n")


async def socket(headers, reader, writer):
    accept = base64.b64encode(hashlib.sha1(headers["sec-websocket-key"].encode() + GUID).digest())
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n")
    writer.write(b"Sec-WebSocket-Protocol: chat\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n")
    while True:
        first, second = await reader.readexactly(2)
        size = second & 127
        if size >= 126:
            size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
        mask = await reader.readexactly(4)
        data = bytes(byte ^ mask[n % 4] for n, byte in enumerate(await reader.readexactly(size)))
        opcode = first & 15
        if opcode == 8:
            return
        if data == b"end":
            writer.write(b"\x88\x02" + (4001).to_bytes(2, "big"))
            await writer.drain()
            continue
        answer = data.decode()[::-1].encode() if opcode == 1 else data[::-1]
        # in two fragments: what passes must put them together
        half = len(answer) // 2
        writer.write(frame(opcode, answer[:half]) + frame(128, answer[half:]))
        await writer.drain()


def frame(first, data):
    if len(data) < 126:
        return bytes((first, len(data))) + data
    return bytes((first, 127)) + len(data).to_bytes(8, "big") + data


async def main():
    server = await asyncio.start_server(served, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


asyncio.run(main())
