"""The floor for a Python gate: an aiohttp server and an aiohttp client, bytes copied, nothing read or kept.

python -m bench.raw_proxy UPSTREAM
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web


async def main(upstream: str) -> None:
    connector = TCPConnector(limit=0)
    async with ClientSession(
        connector=connector, timeout=ClientTimeout(total=None), cookie_jar=DummyCookieJar(), auto_decompress=False
    ) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {"content-type": "application/json", "authorization": request.headers.get("authorization", "")}
            async with session.post(upstream + request.path, data=body, headers=headers) as answer:
                if "event-stream" not in answer.content_type:
                    return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
                out = web.StreamResponse(status=answer.status, headers={"content-type": "text/event-stream"})
                await out.prepare(request)
                async for chunk in answer.content.iter_any():
                    await out.write(chunk)
                await out.write_eof()
                return out

        async def ok(request: web.Request) -> web.Response:
            return web.Response(text="ok")

        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", ok)
        app.router.add_route("*", "/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
