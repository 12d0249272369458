"""The allow-list of a local sandbox, from inside: what is allowed works for programs that know of no proxy, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

import rollyard as ry
from rollyard.core.egress import EgressRefusal
from rollyard.core.errors import ConfigError
from rollyard.net.egress.proxy import WATCHER

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]


@pytest.fixture
async def server():
    """A server on this machine that answers each request with what it was asked; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = head.split(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    served = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with served:
        yield served.sockets[0].getsockname()[1]


@pytest.fixture
async def refusals():
    found: list[EgressRefusal] = []

    async def tell(refusal: EgressRefusal) -> None:
        found.append(refusal)

    WATCHER.set(tell)
    return found


ASK = """
import json, os, socket, sys, urllib.request
plain = urllib.request.build_opener(urllib.request.ProxyHandler({}))
opener = plain if sys.argv[1] == 'plain' else urllib.request.build_opener()
for url in sys.argv[2:]:
    try: print(opener.open(url, timeout=20).read().decode())
    except Exception as error: print(type(error).__name__, str(error)[:60])
"""
REACH = """
import socket
def attempt(name, family, kind, place, data=b''):
    s = socket.socket(family, kind); s.settimeout(10)
    try:
        s.connect(place); s.send(data or b'x'); s.recv(10); print(name, 'reached')
    except OSError as error: print(name, error.errno)
T, U, F, S = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.AF_INET, socket.AF_INET6
attempt('address', F, T, ('192.0.2.1', 443))
attempt('quic', F, U, ('192.0.2.1', 443))
attempt('ipv6', S, T, ('2001:db8::1', 443))
attempt('resolver', F, U, ('192.0.2.53', 53))
attempt('link-local', F, T, ('169.254.1.1', 80))
"""


async def run(box, code: str, *args: str) -> list[str]:
    return (await box.exec(["python3", "-I", "-c", code, *args], timeout=120)).text.splitlines()


async def test_an_allowed_name_is_reached_with_and_without_the_variables_and_another_is_not(backend, server, refusals):
    spec = ry.SandboxSpec(network="allowlist", allowed_hosts=(f"web.test:{server}@127.0.0.1",))
    async with backend.open(spec) as box:
        urls = (f"http://web.test:{server}/a", "http://evil.test/")
        assert (await run(box, ASK, "plain", *urls))[0] == "GET /a HTTP/1.1"
        told = [(refusal.protocol, refusal.host) for refusal in refusals]
        assert ("dns", "evil.test") in told
        said = await run(box, ASK, "proxy", *urls)
        assert said[0] == "GET /a HTTP/1.1" and "403" in said[1]
        assert (refusals[-1].protocol, refusals[-1].host, refusals[-1].sandbox_id) == ("http", "evil.test", box.id)


async def test_nothing_but_the_proxy_leads_out(backend, server):
    spec = ry.SandboxSpec(network="allowlist", allowed_hosts=(f"web.test:{server}@127.0.0.1",))
    async with backend.open(spec) as box:
        said = await run(box, REACH)
        assert [line.split()[0] for line in said] == ["address", "quic", "ipv6", "resolver", "link-local"]
        assert not [line for line in said if line.endswith("reached")]
        written = await box.exec("echo nameserver 192.0.2.53 > /etc/resolv.conf; rm /etc/resolv.conf", timeout=20)
        assert written.exit_code != 0 and b"127.64.0.1" in await box.read("/etc/resolv.conf")


async def test_one_sandbox_reaches_neither_the_host_nor_another_by_its_proxy(backend, server, refusals):
    spec = ry.SandboxSpec(network="allowlist", allowed_hosts=(f"web.test:{server}@127.0.0.1", "*"))
    async with backend.open(spec) as box, backend.open(ry.SandboxSpec()) as other:
        listener = await other.listen(0)
        urls = [f"http://{host}:{port}/" for host in ("127.64.0.1", "localhost.") for port in (server, listener.port)]
        said = await run(box, ASK, "proxy", *urls)
        assert len(said) == 4 and all("403" in line for line in said), said
        assert {refusal.protocol for refusal in refusals} == {"http"}
        await listener.aclose()


async def test_a_sandbox_without_an_allow_list_has_no_proxy(box):
    assert box.egress is None
    assert "proxy" not in (await box.exec("env", timeout=20)).text.lower()
    assert (await run(box, REACH))[0] == "address 101"


async def test_a_rule_that_names_nothing_is_refused_before_anything_opens(backend):
    with pytest.raises(ConfigError, match=r"'127\.1' allows no host"):
        backend.open(ry.SandboxSpec(network="allowlist", allowed_hosts=("127.1",)))
