import json

import pytest
from aiohttp import web

from rollyard.core.call import Sampling
from rollyard.core.errors import ConfigError, UpstreamError
from rollyard.policy.connection import Timeouts
from rollyard.policy.model_server import words_of
from rollyard.policy.upstream_policy import upstream

from .conftest import chat_call, plain_call, user

pytestmark = pytest.mark.anyio

KEY = "sk-provider-secret-1234567890"


def completion(text="hi", **choice):
    return {
        "id": "c1",
        "model": "served-model",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }


def recording(answer, seen):
    async def handler(request):
        seen.append((request, json.loads(await request.read())))
        result = answer(seen[-1][1]) if callable(answer) else answer
        return result if isinstance(result, web.Response) else web.json_response(result)

    return handler


async def test_ids_and_logprobs_of_a_vllm_style_answer_are_kept(serving):
    """R1, K2: tokens are asked for and recorded."""
    seen = []
    answer = completion(
        token_ids=[7, 8], logprobs={"content": [{"token": "h", "logprob": -0.5}, {"token": "i", "logprob": -0.25}]}
    ) | {"prompt_token_ids": [1, 2, 3]}
    policy = upstream(await serving(recording(answer, seen)) + "/v1", model="policy-model", key=KEY)
    reply = await policy(chat_call({"messages": [{"role": "user", "content": "hello"}], "stream": True}))
    request, body = seen[0]
    assert request.path == "/v1/chat/completions" and request.headers["authorization"] == f"Bearer {KEY}"
    assert body["model"] == "policy-model" and body["return_token_ids"] is True and body["top_logprobs"] == 5
    assert not body.get("stream")
    assert list(reply.prompt_ids) == [1, 2, 3] and list(reply.completion_ids) == [7, 8]
    assert list(reply.logprobs) == [-0.5, -0.25] and reply.capture == "tokens" and reply.trainable
    assert policy.level == "tokens" and reply.model == "served-model"
    await policy.aclose()


async def test_side_calls_get_the_policys_model_too(serving):
    seen = []
    policy = upstream(await serving(recording(completion(), seen)) + "/v1", model="policy-model")
    await policy(chat_call({"messages": [], "model": "small-title-model"}, kind="auxiliary"))
    assert seen[0][1]["model"] == "policy-model"
    await policy.aclose()


async def test_what_was_asked_and_what_was_sent_are_both_known(serving):
    seen = []
    policy = upstream(
        await serving(recording(completion(), seen)) + "/v1",
        max_tokens_cap=100,
        disable_thinking=True,
        sampling={"temperature": 1.0, "top_p": 1.0},
    )
    call = chat_call({"messages": [], "temperature": 0.2, "max_tokens": 32000, "seed": 3})
    reply = await policy(call)
    body = seen[0][1]
    assert call.sampling.temperature == 0.2 and call.sampling.max_tokens == 32000
    assert reply.sampling.temperature == 1.0 and reply.sampling.max_tokens == 100 and reply.sampling.seed == 3
    assert body["temperature"] == 1.0 and body["top_p"] == 1.0 and body["max_tokens"] == 100 and body["seed"] == 3
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    await policy.aclose()


async def test_a_server_that_refuses_unknown_fields_is_found_out_once(serving):
    seen = []

    def strict(body):
        if "return_token_ids" in body or "logprobs" in body:
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        return completion()

    policy = upstream(await serving(recording(strict, seen)) + "/v1", model="m")
    assert (await policy.probe()).level == "text"
    assert len(seen) == 4  # three to find out, one with a tool
    await policy(plain_call())
    assert len(seen) == 5 and policy.level == "text"
    await policy.aclose()


async def test_an_ordinary_refusal_is_not_mistaken_for_a_missing_ability(serving):
    seen = []

    def picky(body):
        return web.json_response({"error": "too long"}, status=400) if len(seen) > 1 else completion()

    policy = upstream(await serving(recording(picky, seen)) + "/v1")
    await policy(plain_call())
    with pytest.raises(UpstreamError) as refused:
        await policy(plain_call())
    assert refused.value.status == 400 and len(seen) == 2
    await policy.aclose()


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_a_refusal_is_relayed_with_its_status_and_never_tried_again(serving, status):
    seen = []
    refusal = web.json_response({"error": f"key {KEY} is wrong"}, status=status, headers={"retry-after": "7"})
    policy = upstream(await serving(recording(lambda body: refusal, seen)) + "/v1", key=KEY)
    with pytest.raises(UpstreamError) as refused:
        await policy(plain_call())
    error = refused.value
    assert error.status == status and error.retry_after == 7.0 and len(seen) == 1
    assert KEY not in str(error) and KEY.encode() not in error.body and KEY not in repr(error.__dict__)
    await policy.aclose()


async def test_silence_is_504_and_a_dead_server_502(serving, free_port):
    import asyncio

    async def silent(request):
        await asyncio.sleep(5)
        return web.Response()

    policy = upstream(await serving(silent) + "/v1", timeouts=Timeouts(total=0.05))
    with pytest.raises(UpstreamError) as slow:
        await policy(plain_call())
    assert slow.value.status == 504
    await policy.aclose()
    policy = upstream(f"http://127.0.0.1:{free_port}/v1", key=KEY)
    with pytest.raises(UpstreamError) as dead:
        await policy(plain_call())
    assert dead.value.status == 502 and KEY not in str(dead.value)
    await policy.aclose()


async def test_an_answer_that_is_not_a_completion_is_502(serving):
    async def page(request):
        return web.Response(text="<html>gateway</html>")

    policy = upstream(await serving(page) + "/v1")
    with pytest.raises(UpstreamError) as broken:
        await policy(plain_call())
    assert broken.value.status == 502
    await policy.aclose()


async def test_a_redirect_never_carries_the_key_away(serving):
    stolen = []

    async def thief(request):
        stolen.append(dict(request.headers))
        return web.json_response(completion())

    target = await serving(thief)

    async def redirect(request):
        return web.Response(status=307, headers={"location": f"{target}/v1/chat/completions"})

    policy = upstream(await serving(redirect) + "/v1", key=KEY)
    with pytest.raises(UpstreamError):
        await policy(plain_call())
    assert stolen == []
    await policy.aclose()


async def test_a_session_with_its_own_server_never_gets_the_policys_key(serving):
    seen = []
    own = await serving(recording(completion(), seen))
    policy = upstream("http://127.0.0.1:9/v1", key=KEY)
    await policy(plain_call(options={"base_url": own + "/v1", "model": "theirs", "max_tokens_cap": 5}))
    request, body = seen[0]
    assert "authorization" not in request.headers and body["model"] == "theirs" and body["max_tokens"] == 5
    await policy(plain_call(options={"base_url": own + "/v1", "api_key": "sk-own"}))
    assert seen[1][0].headers["authorization"] == "Bearer sk-own"
    await policy.aclose()


@pytest.mark.parametrize("url", ["ftp://x", "http://user:pw@host/v1", "nonsense", ""])
async def test_a_url_that_cannot_be_used_is_refused_at_once(url):
    with pytest.raises(ConfigError) as refused:
        upstream(url)
    assert "pw" not in str(refused.value)


async def test_sampling_overrides_must_be_sampling_parameters():
    with pytest.raises(ConfigError, match="temprature"):
        upstream("http://127.0.0.1:1/v1", sampling={"temprature": 1})


async def test_llama_cpp_gives_real_ids_and_logprobs(smollm_url):
    """A real server, real tokens: as many ids as logprobs as the usage says, all finite, deterministic at temperature 0."""
    policy = upstream(smollm_url + "/v1", sampling={"temperature": 0.0, "seed": 1})
    call = plain_call(user("What is the capital of France?"), sampling=Sampling(max_tokens=12))
    first, second = await policy(call), await policy(call)
    assert first.message.text and first.completion_ids == second.completion_ids
    assert len(first.completion_ids) == len(first.logprobs) == first.usage.completion_tokens == len(first.tokens)
    assert all(value <= 1e-6 for value in first.logprobs) and not first.flaws
    assert "".join(t.text for t in first.tokens).startswith(first.message.text)
    # A chat API does not say which prompt ids it used
    assert (await policy.probe()).level == first.capture == "logprobs"
    await policy.aclose()


async def test_merged_tokens_of_llama_cpp_make_the_turn_untrainable_not_wrong(smollm_url):
    policy = upstream(smollm_url + "/v1", sampling={"temperature": 0.0, "extra": {"grammar": 'root ::= "🙂🙃🙂🙃"'}})
    reply = await policy(plain_call(user("Smile."), sampling=Sampling(max_tokens=24)))
    assert reply.message.text == "🙂🙃🙂🙃" and reply.completion_ids is None
    assert not reply.trainable and "usage says" in reply.flaws[0]
    await policy.aclose()


def listing(*models, answer=None):
    """Answers with the shape of vLLM 0.32: a model list with `max_model_len`, and 404 for a name that is not in it."""
    seen = []

    async def handler(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": m, "owned_by": "vllm", "max_model_len": 8192} for m in models]})
        body = json.loads(await request.read())
        seen.append(body)
        if body["model"] not in models:
            message = f"The model `{body['model']}` does not exist."
            return web.json_response({"error": {"message": message, "type": "NotFoundError", "code": 404}}, status=404)
        return web.json_response(answer or completion())

    return handler, seen


async def test_without_a_model_the_servers_only_one_is_asked_for_and_half_its_context_is_the_cap(serving):
    handler, seen = listing("smol")
    policy = upstream(await serving(handler) + "/v1")
    await policy(plain_call())
    await policy(plain_call(sampling=Sampling(max_tokens=32000)))
    await policy(plain_call(sampling=Sampling(max_tokens=100), options={"max_tokens_cap": 50}))
    assert [(body["model"], body["max_tokens"]) for body in seen] == [("smol", 4096), ("smol", 4096), ("smol", 50)]
    await policy.aclose()


async def test_without_a_model_an_agents_own_name_is_kept_where_it_is_served_and_refused_among_several(serving):
    handler, seen = listing("agent-model", "smol")
    policy = upstream(await serving(handler) + "/v1")
    await policy(plain_call())
    assert seen[0]["model"] == "agent-model"
    with pytest.raises(ConfigError, match="agent-model, smol"):
        await policy.check("policy")
    await policy.aclose()


async def test_the_servers_own_words_are_in_the_error_without_keys(serving):
    other = "sk-someone-elses-key-0123456789"
    words = json.dumps({"error": {"message": f"no quota for {KEY} or {other}\n" + "x" * 5000}}).encode()
    url = await serving(recording(lambda _: web.Response(status=402, body=words), [])) + "/v1"
    policy = upstream(url, model="m", key=KEY)
    with pytest.raises(UpstreamError) as refused:
        await policy(plain_call())
    said = refused.value.message
    assert said.startswith(f"{url}/chat/completions answered 402: no quota for [key] or [key] x") and len(said) < 2200
    await policy.aclose()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"a b"}}', "a b"),
        (b'{"type":"error","error":{"type":"x","message":"a b"}}', "a b"),
        (b'[{"error":{"code":404,"message":"a b"}}]', "a b"),
        (b'{"object":"error","message":"a b"}', "a b"),
        (b'{"detail":"a b"}', "a b"),
        (b'{"error":"a b"}', "a b"),
        (b"<html>a\n\tb</html>", "<html>a b</html>"),
        (b"", ""),
    ],
)
def test_the_sentence_is_found_in_every_providers_error(body, words):
    assert words_of(body) == words
