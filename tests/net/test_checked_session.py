"""An HTTP session with rules connects to what they allow, at the address that was checked."""

import pytest

from rollyard.net.egress.decide import EgressRules, NotAllowed
from rollyard.net.http_session import HttpFailure, HttpSession
from tests.images.registry import AnsweringServer

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]


def resolver(*answers):
    left = list(answers)

    async def resolve(name):
        return [left.pop(0) if len(left) > 1 else left[0]]

    return resolve


async def test_a_name_is_connected_to_at_the_address_that_its_rule_names():
    with AnsweringServer(lambda path, headers: (200, {}, b"here")) as server:
        port = server.host.partition(":")[2]
        async with HttpSession(rules=EgressRules([f"registry.test:{port}@127.0.0.1"])) as session:
            answer = await session.request("GET", f"http://registry.test:{port}/x", timeout_s=10)
        assert (answer.status, answer.body, server.seen[0][1]["host"]) == (200, b"here", f"registry.test:{port}")


@pytest.mark.parametrize("answers", [("127.0.0.1",), ("203.0.113.9", "127.0.0.1")])
async def test_a_name_that_leads_to_this_machine_is_not_connected_to(answers):
    """At once, or by a name server that says something else the second time."""
    with AnsweringServer(lambda path, headers: (200, {}, b"")) as server:
        url = f"http://registry.test:{server.host.partition(':')[2]}/x"
        async with HttpSession(rules=EgressRules(["*"], resolver(*answers))) as session:
            with pytest.raises((NotAllowed, HttpFailure)):
                await session.request("GET", url, timeout_s=10)
            with pytest.raises((NotAllowed, HttpFailure)):
                await session.stream("GET", url, None, {}, connect_s=5, idle_s=5)
            with pytest.raises(NotAllowed):
                await session.request("GET", f"http://{server.host}/", timeout_s=10)
        assert server.seen == []
