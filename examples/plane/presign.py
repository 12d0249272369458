"""An instance that is reached by a signed URL alone: create, presign, poll, call, delete, with the data plane off.

rollyard serve plane --engine local --print-env > plane.env &
ROLLYARD_URL=... ROLLYARD_KEY=... python examples/plane/presign.py
"""

import asyncio
import os

import aiohttp

import rollyard as ry

PORT = 9000


async def main() -> None:
    url, key = os.environ["ROLLYARD_URL"], os.environ["ROLLYARD_KEY"]
    async with ry.plane.connect(url, key, data_plane=False) as plane:
        start = ["python3", "-m", "http.server", str(PORT), "--bind", "127.0.0.1", "--directory", "/tmp"]
        made = await plane.instances.create(image="host", start=start, ttl_s=300, labels={"example": "presign"})
        try:
            await plane.instances.write(made["id"], "/tmp/hello.txt", b"hello from inside\n")
            signed = await plane.instances.wait(made["id"], PORT, "/hello.txt")  # until 2xx, within 45 s
            async with aiohttp.ClientSession() as anybody, anybody.get(signed + "hello.txt") as answer:
                print((await answer.text()).strip())
        finally:
            await plane.instances.delete(made["id"])
        print("deleted")


if __name__ == "__main__":
    asyncio.run(main())
