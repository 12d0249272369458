"""A server in an instance, reached by a signed URL, with the data plane off: create, presign, poll, call, delete.

    rollyard serve plane --print-env > plane.env &
    set -a; . ./plane.env; set +a
    python examples/plane_presign.py

Nothing but the control API and the URL it gives is touched, so the same program works on engines whose instances the plane itself
cannot reach. That an instance runs does not say that the server in it listens: hence the poll.
"""

import asyncio
import os
import urllib.request

import rollyard as ry
from rollyard.plane.client.plane import wait_until_ok

PORT = 18080
SERVER = ["python3", "-m", "http.server", str(PORT), "--bind", "127.0.0.1", "--directory", "/etc"]


async def main() -> None:
    url, key = os.environ["ROLLYARD_URL"], os.environ["ROLLYARD_KEY"]
    async with ry.plane.connect(url, key, data_plane=False) as plane:
        made = await plane.instances.create(image="host", start=SERVER, ttl_s=300)
        print("created", made["id"], made["state"])
        try:
            signed = await plane.instances.presign(made["id"], PORT, minutes=0.5)
            await wait_until_ok(signed, within_s=45)
            page = await asyncio.to_thread(lambda: urllib.request.urlopen(signed + "os-release", timeout=30).read())
            print("called", page.decode().splitlines()[0])
        finally:
            await plane.instances.delete(made["id"])
            print("deleted", made["id"])


if __name__ == "__main__":
    asyncio.run(main())
