"""Ways around the egress proxy, each of which must fail: nothing arrives behind it, and the attempt is told."""

from __future__ import annotations

import asyncio
import os

import pytest

from rollyard.core.egress import narrow, parse_network_option, parse_rule
from rollyard.core.errors import ConfigError
from tests.net.egress_attempts import client_hello, egress_fixture, in_records, question, with_encrypted_hello

pytestmark = pytest.mark.anyio
RULES = ("web.test:{port}@127.0.0.1", "*.wild.test:{port}@127.0.0.1", "rebound.test:{port}", "strict.test@127.0.0.1")
NAMES = {"rebound.test": ["127.0.0.1", "169.254.1.1", "10.0.0.1", "::1", "fe80::1", "::ffff:127.0.0.1"]}
GET = "GET http://{host}:{{port}}/ HTTP/1.1\r\nHost: {host}:{{port}}\r\n\r\n"


def connect(host: str) -> str:
    return f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\nGET / HTTP/1.1\r\nHost: {host}\r\n\r\n"


HOSTS = {
    "an address": "127.0.0.1:{port}",
    "an address of IPv6": "[::1]:{port}",
    "IPv4 inside of IPv6": "[::ffff:127.0.0.1]:{port}",
    "an address with a zone": "[fe80::1%lo]:{port}",
    "a decimal address": "2130706433:{port}",
    "a hexadecimal address": "0x7f000001:{port}",
    "an octal address": "0177.0.0.1:{port}",
    "a short address": "127.1:{port}",
    "an address with a dot": "127.0.0.1.:{port}",
    "this machine's name": "localhost:{port}",
    "nobody's address": "0.0.0.0:{port}",
    "another name": "evil.test:{port}",
    "a name that ends like an allowed one": "evilweb.test:{port}",
    "a name that begins like an allowed one": "web.test.evil.test:{port}",
    "the name above a wildcard": "wild.test:{port}",
    "a name that leads to this machine (rebinding)": "rebound.test:{port}",
    "another port": "web.test:1",
    "the web's ports of a name with another": "web.test:443",
    "a user before the host": "web.test@evil.test:{port}",
    "a zero in a name": "web.test%00.evil.test:{port}",
    "a name of another alphabet": "wеb.test:{port}",
    "no port": "web.test",
    "a port that is none": "web.test:99999",
}


@pytest.mark.adversarial
@pytest.mark.parametrize("attempt", HOSTS)
async def test_a_tunnel_to_what_no_rule_names_is_refused(attempt):
    async with egress_fixture(*RULES, names=NAMES) as there:
        said = await there.send(connect(HOSTS[attempt]).format(port=there.server).encode("utf-8"))
        assert said.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400")), said
        assert (there.upstream.connections, len(there.refusals)) == (0, 1)


REQUESTS = {
    "another host": GET.format(host="evil.test"),
    "an address": GET.format(host="127.0.0.1"),
    "a target and a Host that differ": "GET http://web.test:{port}/ HTTP/1.1\r\nHost: evil.test:{port}\r\n\r\n",
    "two Hosts": "GET http://web.test:{port}/ HTTP/1.1\r\nHost: web.test:{port}\r\nHost: evil.test\r\n\r\n",
    "a folded header": "GET http://web.test:{port}/ HTTP/1.1\r\nHost: web.test:{port}\r\n evil.test\r\n\r\n",
    "a bare line feed": "GET http://web.test:{port}/ HTTP/1.1\r\nHost: web.test:{port}\r\nX: y\nHost: evil.test\r\n\r\n",
    "two lengths": "POST http://web.test:{port}/ HTTP/1.1\r\nHost: web.test:{port}\r\nContent-Length: 1\r\n"
    "Content-Length: 2\r\n\r\nab",
    "a length and chunks": "POST http://web.test:{port}/ HTTP/1.1\r\nHost: web.test:{port}\r\nContent-Length: 1\r\n"
    "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a user before the host": "GET http://web.test:{port}@evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    "another scheme": "GET ftp://web.test:{port}/ HTTP/1.1\r\nHost: web.test:{port}\r\n\r\n",
    "HTTP/2 without TLS": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "the proxy's own pages": "GET /config HTTP/1.1\r\nHost: 127.64.0.1:3128\r\n\r\n",
    "a WebSocket elsewhere": "GET http://evil.test:{port}/ HTTP/1.1\r\nHost: evil.test:{port}\r\nConnection: Upgrade\r\n"
    "Upgrade: websocket\r\n\r\n",
    "a WebSocket with a body": "GET http://web.test:{port}/ HTTP/1.1\r\nHost: web.test:{port}\r\nConnection: Upgrade\r\n"
    "Upgrade: websocket\r\nContent-Length: 3\r\n\r\nabc",
}


@pytest.mark.adversarial
@pytest.mark.parametrize("attempt", REQUESTS)
async def test_a_request_that_is_not_plainly_for_an_allowed_host_is_refused(attempt):
    async with egress_fixture(*RULES, names=NAMES) as there:
        said = await there.send(REQUESTS[attempt].format(port=there.server).encode())
        assert said.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400")), said
        assert (there.upstream.connections, len(there.refusals)) == (0, 1)


HELLOS = {
    "for another name": client_hello("evil.test"),
    "for another allowed name": client_hello("strict.test"),
    "without a name": client_hello(None),
    "with an encrypted name": with_encrypted_hello(client_hello("web.test")),
    "for another name, in small records": in_records(client_hello("evil.test"), 7),
    "that is none": b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00",
    "that never ends": b"\x16\x03\x01\x40\x00\x01\x00\x3f\xff",
}


@pytest.mark.adversarial
@pytest.mark.parametrize("attempt", HELLOS)
async def test_tls_in_a_tunnel_has_to_be_for_its_host(attempt):
    async with egress_fixture(*RULES, names=NAMES) as there:
        head = f"CONNECT web.test:{there.server} HTTP/1.1\r\n\r\n".encode()
        await there.send(head + HELLOS[attempt])
        assert (bytes(there.upstream.got), [refusal.protocol for refusal in there.refusals]) == (b"", ["tls"])


@pytest.mark.adversarial
@pytest.mark.skipif(os.geteuid() != 0, reason="only root listens on the web's ports")
@pytest.mark.parametrize("port", [80, 443])
async def test_on_the_webs_ports_nothing_is_spoken_but_tls_and_http(port):
    """The server is at an address of loopback that no other process of the tests has."""
    address, got = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}.9", bytearray()

    async def keep(reader, writer):
        got.extend(await reader.read())
        writer.close()

    async with await asyncio.start_server(keep, address, port):
        for data in (b"SSH-2.0-OpenSSH_9.2\r\n", b"\0\0\0\x2a\x01binary"):
            async with egress_fixture(f"strict.test@{address}") as there:
                await there.send(f"CONNECT strict.test:{port} HTTP/1.1\r\n\r\n".encode() + data)
                refused = [(refusal.protocol, refusal.port) for refusal in there.refusals]
                assert (bytes(got), refused) == (b"", [("tcp", port)])


async def test_tls_for_its_host_passes_untouched():
    for hello in (client_hello("web.test"), in_records(client_hello("WEB.test"), 7)):
        async with egress_fixture(*RULES) as there:
            there.upstream.answer = b""
            await there.send(f"CONNECT web.test:{there.server} HTTP/1.1\r\n\r\n".encode() + hello)
            assert bytes(there.upstream.got) == hello and not there.refusals


TUNNELLED = {
    "a request for another host": b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    "a whole URL of another host": b"GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    "a proxy behind the proxy": b"CONNECT evil.test:443 HTTP/1.1\r\nHost: web.test\r\n\r\n",
    "no Host at all": b"GET / HTTP/1.0\r\n\r\n",
}


@pytest.mark.adversarial
@pytest.mark.parametrize("attempt", TUNNELLED)
async def test_a_plain_request_in_a_tunnel_has_to_be_for_its_host(attempt):
    async with egress_fixture(*RULES) as there:
        await there.send(f"CONNECT web.test:{there.server} HTTP/1.1\r\n\r\n".encode() + TUNNELLED[attempt])
        assert bytes(there.upstream.got) == b"" and [refusal.protocol for refusal in there.refusals] == ["http"]


SECOND = b"GET /secret HTTP/1.1\r\nHost: evil.test\r\n\r\n"


@pytest.mark.adversarial
@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (b"", b""),
        (b"Content-Length: 4\r\n", b"body"),
        (b"Transfer-Encoding: chunked\r\n", b"4\r\nbody\r\n0\r\nX: trailer\r\n\r\n"),
        (b"Connection: keep-alive\r\n", b""),
    ],
)
async def test_a_second_request_behind_an_allowed_one_is_not_sent_on(headers, body):
    async with egress_fixture(*RULES) as there:
        target = f"web.test:{there.server}".encode()
        first = b"POST http://" + target + b"/ HTTP/1.1\r\nHost: " + target + b"\r\n" + headers + b"\r\n" + body
        said = await there.send(first + SECOND)
        assert said.endswith(b"hi") and b"connection: close" in there.upstream.got
        assert b"secret" not in there.upstream.got and b"evil" not in there.upstream.got


@pytest.mark.adversarial
async def test_a_websocket_that_its_server_does_not_take_opens_no_way_for_more():
    upgrade = (
        "GET http://web.test:{0}/ HTTP/1.1\r\nHost: web.test:{0}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    async with egress_fixture(*RULES) as there:
        await there.send(upgrade.format(there.server).encode() + SECOND)
        assert b"upgrade: websocket" in there.upstream.got and b"secret" not in there.upstream.got
    async with egress_fixture(*RULES) as there:
        there.upstream.answer, there.upstream.closes = b"HTTP/1.1 101 Switching Protocols\r\n\r\n", False
        await there.send(upgrade.format(there.server).encode() + b"\x81\x02hi")
        assert there.upstream.got.endswith(b"\x81\x02hi")


@pytest.mark.adversarial
async def test_a_port_of_the_web_carries_the_web_alone():
    async with egress_fixture("strict.test@127.0.0.1", "web.test:{port}@127.0.0.1") as there:
        await there.send(f"CONNECT web.test:{there.server} HTTP/1.1\r\n\r\nSSH-2.0-x\r\n".encode())
        assert there.upstream.got == b"SSH-2.0-x\r\n"  # a port that a rule names is for anything
        assert parse_rule("strict.test").covers_port(443) and not parse_rule("strict.test").covers_port(22)


@pytest.mark.adversarial
async def test_a_redirect_is_a_new_request():
    async with egress_fixture(*RULES) as there:
        there.upstream.answer = b"HTTP/1.1 302 Found\r\nLocation: http://evil.test/\r\nContent-Length: 0\r\n\r\n"
        said = await there.send(GET.format(host="web.test").format(port=there.server).encode())
        assert b"302" in said and not there.refusals
        assert (await there.send(GET.format(host="evil.test").format(port=80).encode())).startswith(b"HTTP/1.1 403")
        assert there.upstream.connections == 1


@pytest.mark.adversarial
async def test_a_name_is_looked_up_once_and_only_permitted_addresses_are_connected_to():
    answers = {"two.test": ["10.0.0.1", "127.0.0.1"]}
    async with egress_fixture("two.test:{port}@127.0.0.0/8", names=answers) as there:
        said = await there.send(GET.format(host="two.test").format(port=there.server).encode())
        assert said.endswith(b"hi") and there.asked == ["two.test"]
        assert (await there.send(GET.format(host="other.test").format(port=there.server).encode())).startswith(
            b"HTTP/1.1 403"
        )
        assert there.asked == ["two.test"]  # a refused name is not even looked up


@pytest.mark.adversarial
async def test_dns_answers_for_allowed_names_alone_and_asks_nobody():
    async with egress_fixture(*RULES) as there:
        kinds = {"TXT": 16, "NULL": 10, "MX": 15, "ANY": 255}
        for kind in kinds.values():
            reply = await there.proxy.answer_question(question("web.test", kind))
            assert reply is not None and reply[3] & 15 == 0 and reply[6:8] == b"\0\0"  # no record
        for name in ("c2VjcmV0.evil.test", "evil.test", "a" * 63 + ".evil.test", "1.0.0.127.in-addr.arpa"):
            reply = await there.proxy.answer_question(question(name))
            assert reply is not None and reply[3] & 15 == 3 and reply[6:8] == b"\0\0"
        assert [refusal.protocol for refusal in there.refusals] == ["dns"] * 4 and there.asked == []
        assert await there.proxy.answer_question(b"\0\1\1\0\0\1\0\0\0\0\0\0\xc0\x0c\0\1\0\1") is None  # a pointer
        assert (await there.proxy.answer_question(question("web.test", count=2)) or b"")[3] & 15 == 4
        assert await there.proxy.answer_question(b"short") is None


async def test_an_allowed_name_has_a_loopback_address_that_leads_to_its_host():
    async with egress_fixture(*RULES) as there:
        reply = await there.proxy.answer_question(question("WEB.test"))
        assert reply is not None and reply[6:8] == b"\0\1" and reply[-4] == 127 and reply[-3] >= 64
        address = ".".join(map(str, reply[-4:]))
        for host, said in ((f"web.test:{there.server}", b"hi"), ("evil.test", b"a request for evil.test:")):
            reader, writer = await asyncio.open_connection(address, there.server)
            writer.write(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert said in await reader.read()
            writer.close()
        assert [refusal.protocol for refusal in there.refusals] == ["http"]


async def test_what_is_no_longer_allowed_ends():
    async with egress_fixture(*RULES) as there:
        there.upstream.answer = b""
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        writer.write(f"CONNECT web.test:{there.server} HTTP/1.1\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n")
        there.proxy.allow([])
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()
        assert (await there.send(connect(f"web.test:{there.server}").encode())).startswith(b"HTTP/1.1 403")


async def test_refusals_beyond_a_number_are_counted():
    async with egress_fixture() as there:
        for _ in range(510):
            await there.proxy.answer_question(question("evil.test"))
        assert len(there.refusals) == 500
        await there.proxy.aclose()
        assert there.refusals[-1].reason == "10 more were refused"


@pytest.mark.parametrize(
    ("asked", "wish", "given"),
    [
        ((None, ()), "task", (None, ())),
        (("host", ()), "task", ("none", ())),
        (("allowlist", ("a.b",)), "task", ("allowlist", ("a.b",))),
        (("host", ()), "public", ("host", ())),
        ((None, ()), "public", ("host", ())),
        (("none", ()), "public", ("none", ())),
        (("allowlist", ("a.b",)), "public", ("allowlist", ("a.b",))),
        (("host", ()), "none", ("none", ())),
        (("host", ()), "allow:a.b", ("allowlist", ("a.b",))),
        ((None, ()), "allow:127.0.0.1:80", ("allowlist", ("127.0.0.1:80@127.0.0.1",))),
        (("none", ()), "allow:a.b", ("none", ())),
        (("allowlist", ("*.b", "c.d")), "allow:a.b,e.f", ("allowlist", ("a.b",))),
        (("allowlist", ("a.b",)), "allow:*.b", ("allowlist", ("a.b",))),
        (("allowlist", ("a.b",)), "allow:c.d", ("none", ())),
        (("allowlist", ("10.0.0.0/8",)), "allow:10.1.0.0/16", ("allowlist", ("10.1.0.0/16@10.1.0.0/16",))),
    ],
)
def test_a_task_gets_no_more_than_it_asks_for_and_no_more_than_is_wished(asked, wish, given):
    assert narrow(asked, parse_network_option(wish)) == given


@pytest.mark.parametrize(
    "wish", ["", "all", "allow", "allow:", "none:x", "allow:http://a.b", "allow:a.b:0", "allow:127.1"]
)
def test_a_wish_that_says_nothing_is_refused(wish):
    with pytest.raises(ConfigError):
        parse_network_option(wish)
