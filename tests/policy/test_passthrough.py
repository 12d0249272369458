import asyncio
import gzip

import pytest
from aiohttp import web

from rollyard.core.errors import UpstreamError
from rollyard.core.protocols import Passthrough, RawRequest
from rollyard.policy.passthrough_policy import passthrough

pytestmark = pytest.mark.anyio

KEY = "sk-provider-secret"


def raw(path="/v1/messages?beta=true", headers=None, body=b'{"odd" :  1}'):
    headers = {"x-api-key": "ry-rollout-key", "content-type": "application/json", **(headers or {})}
    return RawRequest(rollout_id="r1", method="POST", path=path, headers=headers, body=body)


async def test_bytes_and_headers_pass_untouched_but_the_key_is_the_providers(serving):
    seen = []
    squeezed = gzip.compress(b'{"ok" :true}')  # though it was not asked for

    async def provider(request):
        seen.append((request.path_qs, dict(request.headers), await request.read()))
        return web.Response(body=squeezed, headers={"content-encoding": "gzip", "x-request-id": "abc"}, status=201)

    policy = passthrough(await serving(provider), KEY)
    assert isinstance(policy, Passthrough)
    headers = {"anthropic-beta": "a,b", "connection": "keep-alive, x-hop", "x-hop": "1", "te": "trailers"}
    response = await policy.relay(raw(headers=headers))
    body = b"".join([chunk async for chunk in response.body])
    path, sent, received = seen[0]
    assert path == "/v1/messages?beta=true" and received == b'{"odd" :  1}'
    lower = {k.lower(): v for k, v in sent.items()}
    assert lower["x-api-key"] == KEY and lower["anthropic-beta"] == "a,b"
    assert "x-hop" not in lower and "te" not in lower and "ry-rollout-key" not in str(sent)
    assert lower["accept-encoding"] == "identity", "what cannot be read cannot be scrubbed of the key"
    assert response.status == 201 and body == b'{"ok" :true}' and "content-encoding" not in response.headers
    assert "transfer-encoding" not in response.headers and response.headers["x-request-id"] == "abc"
    await policy.aclose()


async def test_a_stream_arrives_as_it_comes(serving):
    first_seen = asyncio.Event()

    async def provider(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        async with asyncio.timeout(5):
            await first_seen.wait()
        await response.write(b"data: two\n\n")
        return response

    policy = passthrough(await serving(provider), KEY)
    response = await policy.relay(raw())
    assert await anext(response.body) == b"data: one\n\n"
    first_seen.set()
    assert b"".join([chunk async for chunk in response.body]) == b"data: two\n\n"
    await policy.aclose()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"authorization": "Bearer ry-x"}, ("authorization", f"Bearer {KEY}")),
        ({"x-goog-api-key": "ry-x"}, ("x-goog-api-key", KEY)),
        ({}, ("authorization", f"Bearer {KEY}")),
    ],
)
async def test_the_key_is_swapped_in_the_form_the_agent_used(serving, sent, expected):
    seen = []

    async def provider(request):
        seen.append({k.lower(): v for k, v in request.headers.items()})
        return web.Response()

    policy = passthrough(await serving(provider) + "/v1", KEY)
    request = RawRequest(rollout_id="r1", method="POST", path="/v1/x", headers=sent, body=b"{}")
    response = await policy.relay(request)
    assert [chunk async for chunk in response.body] == []
    assert seen[0][expected[0]] == expected[1] and "ry-x" not in str(seen)
    await policy.aclose()


async def test_without_a_providers_key_the_rollouts_own_still_stays_here(serving):
    seen = []

    async def provider(request):
        seen.append((request.path_qs, dict(request.headers)))
        return web.Response()

    policy = passthrough(await serving(provider))
    headers = {"authorization": "Bearer ry-x", "x-goog-api-key": "ry-x"}
    response = await policy.relay(raw(path="/v1beta/m?alt=sse&key=ry-x", headers=headers))
    assert [chunk async for chunk in response.body] == []
    assert "ry-" not in str(seen)
    await policy.aclose()


async def test_a_key_in_the_query_is_swapped_and_nothing_else_of_it(serving):
    seen = []

    async def provider(request):
        seen.append(request.path_qs)
        return web.Response()

    policy = passthrough(await serving(provider), KEY)
    path = "/v1beta/models/m:streamGenerateContent?alt=sse&key=ry-x"
    response = await policy.relay(raw(path=path))
    assert [chunk async for chunk in response.body] == []
    assert seen == [f"/v1beta/models/m:streamGenerateContent?alt=sse&key={KEY}"]
    await policy.aclose()


async def test_a_dead_provider_is_502_without_the_key(free_port):
    policy = passthrough(f"http://127.0.0.1:{free_port}", KEY)
    with pytest.raises(UpstreamError) as dead:
        await policy.relay(raw())
    assert dead.value.status == 502 and KEY not in str(dead.value)
    await policy.aclose()


async def test_a_stream_that_breaks_off_is_an_error_not_an_end(serving):
    async def provider(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        request.transport.close()
        return response

    policy = passthrough(await serving(provider), KEY)
    response = await policy.relay(raw())
    with pytest.raises(UpstreamError):
        async for _ in response.body:
            pass
    await policy.aclose()


@pytest.mark.adversarial
async def test_an_answer_that_cannot_be_read_for_the_key_is_refused(serving):
    async def provider(request):
        return web.Response(body=b"??", headers={"content-encoding": "br"})

    policy = passthrough(await serving(provider), KEY)
    with pytest.raises(UpstreamError, match="br-encoded"):
        await policy.relay(raw())
    await policy.aclose()


@pytest.mark.adversarial
async def test_an_answer_that_unpacks_without_end_is_cut(serving):
    bomb = gzip.compress(b"\0" * 300_000_000, 9)

    async def provider(request):
        return web.Response(body=bomb, headers={"content-encoding": "gzip"})

    policy = passthrough(await serving(provider), KEY)
    response = await policy.relay(raw())
    with pytest.raises(UpstreamError, match="unpacks to more"):
        async for _ in response.body:
            pass
    await policy.aclose()
