"""What an agent may ask a provider for, in each dialect: by allow-list. The refusals, and that real agents' own members pass."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from rollyard.policy import upstream
from tests.gate.conftest import ask, chat, open_gate
from tests.policy.conftest import serving

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]
__all__ = ["serving"]
RESPONSES = {"model": "m", "input": "hi"}
MESSAGES = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
PATHS = {
    "chat": ("/v1/chat/completions", chat("hi")),
    "completions": ("/v1/completions", {"model": "m", "prompt": "hi"}),
    "responses": ("/v1/responses", RESPONSES),
    "messages": ("/v1/messages", MESSAGES),
    "gemini": ("/v1beta/models/m:generateContent", GEMINI),
}
REFUSED = [
    ("chat", {"chat_template": "{{ 'you are free' }}"}),
    ("chat", {"chat_template": ""}),
    ("chat", {"chat_template_kwargs": {"add_generation_prompt": False}}),
    ("chat", {"chat_template_kwargs": ["enable_thinking"]}),
    ("chat", {"logit_bias": {"50256": 100}}),
    ("chat", {"kv_transfer_params": {"do_remote_prefill": True}}),
    ("chat", {"store": True}),
    ("chat", {"skip_special_tokens": False}),
    ("chat", {"documents": [{"text": "x"}]}),
    ("chat", {"guided_regex": "x*"}),
    ("chat", {"models": ["another"]}),
    ("completions", {"logit_bias": {"1": 100}}),
    ("completions", {"prompt_embeds": "AAAA"}),
    ("responses", {"conversation": "conv_1"}),
    ("responses", {"prompt": {"id": "pmpt_1"}}),
    ("responses", {"background": True}),
    ("responses", {"store": True}),
    ("responses", {"previous_response_id": "resp_1"}),
    ("responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]}),
    ("messages", {"container": "container_1"}),
    ("messages", {"mcp_servers": [{"url": "https://example.com"}]}),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": "f"}}]}]},
    ),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}]}),
    ("gemini", {"cachedContent": "cachedContents/1"}),
    ("gemini", {"cached_content": "cachedContents/1"}),
    ("gemini", {"contents": [{"parts": [{"fileData": {"fileUri": "files/1", "mimeType": "image/png"}}]}]}),
    ("gemini", {"contents": [{"parts": [{"text": "x", "file_data": {"file_uri": "files/1"}}]}]}),
    (
        "gemini",
        {
            "contents": [
                {"parts": [{"functionResponse": {"name": "f", "parts": [{"fileData": {"fileUri": "files/1"}}]}}]}
            ]
        },
    ),
]
# What codex, pi, opencode, qwen, claude-code and gemini send beyond the conversation.
PASSED = [
    ("chat", {"store": False, "prompt_cache_key": "k", "stream_options": {"include_usage": True}}),
    ("chat", {"chat_template_kwargs": {"enable_thinking": False}, "logit_bias": {}, "conversation": None}),
    ("chat", {"reasoning_effort": "low", "metadata": {"sessionId": "s"}, "user": "u", "verbosity": "low"}),
    (
        "responses",
        {
            "store": False,
            "background": False,
            "prompt": None,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "client_metadata": {"x": "y"},
            "text": {"verbosity": "low"},
            "service_tier": "auto",
        },
    ),
    (
        "messages",
        {
            "metadata": {"user_id": "u"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "high"},
        },
    ),
    ("gemini", {"safetySettings": [], "generationConfig": {"temperature": 0}}),
]


@pytest.mark.parametrize(("dialect", "members"), REFUSED, ids=lambda value: str(value)[:50])
async def test_members_that_reach_the_providers_state_or_the_sampling_are_refused(serving, dialect, members):
    reached = []

    async def provider(request):
        reached.append(request.path)
        return web.json_response({})

    policy = upstream(await serving(provider), "m", dialect=dialect)
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        path, body = PATHS[dialect]
        answer = await ask(gate, "POST", path, key=session.key, body={**body, **members})
        assert answer.status == 400 and "error" in answer.json
        assert [p for p in reached if "models" not in p or ":" in p] == []
        assert session.calls == 0
    await policy.aclose()


@pytest.mark.parametrize(("dialect", "members"), PASSED, ids=lambda value: str(value)[:50])
async def test_what_real_agents_send_is_passed_on_as_it_was(serving, dialect, members):
    reached = []

    async def provider(request):
        if request.method == "POST":
            reached.append(json.loads(await request.read()))
        return web.json_response({}, status=500)

    policy = upstream(await serving(provider), "m", dialect=dialect, top_logprobs=0, token_ids=False)
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        path, body = PATHS[dialect]
        assert (await ask(gate, "POST", path, key=session.key, body={**body, **members})).status == 500
        (sent,) = reached
        kept = {name: value for name, value in members.items() if name != "stream_options"}
        assert {name: sent[name] for name in kept} == kept
    await policy.aclose()


async def test_a_refused_member_is_named_in_the_answer():
    async with open_gate() as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", PATHS["chat"][0], key=session.key, body=chat("hi", chat_template="x"))
        assert "chat_template" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "name", ["../files", "m/../../files", "..%2f..%2ffiles", "%252e%252e/files", "m/./x", "..\\files", "m//x"]
)
async def test_a_models_name_does_not_choose_the_path_at_the_provider(serving, name):
    reached = []

    async def provider(request):
        reached.append(request.raw_path)
        if request.method == "GET":
            return web.json_response({}, status=404)
        return web.json_response({"candidates": [{"content": {"parts": [{"text": "hi"}]}, "finishReason": "STOP"}]})

    url = await serving(provider)
    for policy in (
        upstream(url + "/v1beta", dialect="gemini", key="k" * 20),
        upstream(url, "m?x#y z", dialect="gemini"),
    ):
        async with open_gate(policy) as gate:
            session = await gate.open_session("r1")
            path = f"/v1beta/models/{name}:generateContent"
            answer = await ask(gate, "POST", path, key=session.key, body=GEMINI)
            if policy.settings.model is None:
                assert answer.status >= 400
        await policy.aclose()
    posted = [path for path in reached if not path.partition("?")[0].endswith("/models")]
    assert set(posted) <= {"/models/m%3Fx%23y%20z:generateContent"}


async def test_at_gemini_an_agent_may_choose_only_what_the_server_lists(serving):
    reached = []

    async def provider(request):
        if request.method == "GET":
            return web.json_response({"models": [{"name": "models/listed"}, {"name": "models/other"}]})
        reached.append(request.path)
        return web.json_response({"candidates": [{"content": {"parts": [{"text": "hi"}]}, "finishReason": "STOP"}]})

    policy = upstream(await serving(provider), dialect="gemini")
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        for name, status in (("listed", 200), ("expensive", 400)):
            path = f"/v1beta/models/{name}:generateContent"
            assert (await ask(gate, "POST", path, key=session.key, body=GEMINI)).status == status
    assert reached == ["/models/listed:generateContent"]
    await policy.aclose()
