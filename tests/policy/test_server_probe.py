"""What `probe` and `rollyard doctor --base-url` say of servers in the shapes that real ones were seen to have."""

import asyncio
import json
import sys

import pytest
from aiohttp import web

import rollyard as ry

from .test_upstream import completion

pytestmark = pytest.mark.anyio
IDS = {"token_ids": [7], "logprobs": {"content": [{"token": "h", "logprob": -0.5}]}}
NEEDS_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


def server(owner="vllm", *, tools=True, ids=True, message=None, models=("smol",)):
    async def handler(request):
        if request.path == "/v1/models":
            listed = [{"id": name, "owned_by": owner, "max_model_len": 2048, "root": "/models/smol"} for name in models]
            return web.json_response({"data": listed})
        if request.path == "/inference/v1/generate":
            return web.json_response({}, status=403)
        body = json.loads(await request.read())
        if body.get("tools") and not tools:
            return web.json_response({"error": {"message": NEEDS_PARSER}}, status=400)
        if request.path == "/v1/completions":
            return web.json_response(
                {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "length"}]}
            )
        answer = completion(**(IDS if ids else {})) | ({"prompt_token_ids": [1, 2]} if ids else {})
        answer["choices"][0]["message"] |= message or {}
        answer["usage"]["completion_tokens"] = 1
        return web.json_response(answer)

    return handler


def rows(probe):
    return {row.name: row for row in probe.rows}


async def test_a_server_that_gives_everything_needs_no_advice(serving):
    policy = ry.policy.upstream(await serving(server(message={"reasoning_content": "hm"})) + "/v1")
    probe = await policy.probe()
    assert probe.level == "tokens" and not any(row.advice for row in probe.rows)
    found = {name: row.found for name, row in rows(probe).items()}
    assert found["endpoint"] == "/chat/completions" and found["model"] == "smol"
    assert found["context"].startswith("2048 tokens") and "can be trained on" in found["tokens"]
    assert found["tools"].startswith("taken") and found["thinking"] == "comes apart from the text"
    assert str(probe).splitlines()[0] == policy.settings.url and "smol" in str(probe)
    await policy.aclose()


@pytest.mark.parametrize(
    ("owner", "flag"), [("vllm", "--reasoning-parser"), ("llamacpp", "--jinja"), ("somebody", "engines that give ids")]
)
async def test_what_a_server_does_not_give_comes_with_what_to_start_it_with(serving, owner, flag):
    shape = server(owner, tools=False, ids=False, message={"content": "<think>\nhm"})
    policy = ry.policy.upstream(await serving(shape) + "/v1")
    probe = await policy.probe()
    assert probe.level == "text" and NEEDS_PARSER in rows(probe)["tools"].found
    assert rows(probe)["thinking"].found == "stands in the text"
    assert all(rows(probe)[name].advice for name in ("tokens", "tools", "thinking"))
    assert flag in str(probe)
    await policy.aclose()


async def test_tokens_says_which_endpoint_it_uses_and_that_it_reads_calls_itself(serving, tool_model):
    policy = ry.policy.tokens(await serving(server()), renderer=ry.policy.renderer(tool_model))
    found = rows(await policy.probe())
    assert found["endpoint"].found == "/v1/completions" and "--enable-scale-out" in found["endpoint"].advice
    assert "parsed here" in found["tools"].found and "parsed here" in found["thinking"].found
    await policy.aclose()


async def doctor(*words):
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from rollyard.cli.main import main; main()", "doctor", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await program.communicate()
    return program.returncode, out.decode(), errors.decode()


async def test_the_doctor_examines_a_server(serving, free_port):
    url = await serving(server(tools=False))
    code, out, _ = await doctor("--base-url", url, "--json")
    report = json.loads(out)
    found = {(row["group"], row["name"]): row for row in report["findings"]}
    assert code == 0 and report["healthy"]
    assert found["upstream", "tokens"]["state"] == "ok"
    assert (
        found["upstream", "tools"]["state"] == "weak" and "--tool-call-parser" in found["upstream", "tools"]["advice"]
    )
    assert "/models/smol" in found["tokens", "server"]["found"] and "renderer=" in found["tokens", "server"]["advice"]
    code, out, _ = await doctor("--base-url", f"http://127.0.0.1:{free_port}")
    assert code == 3 and "no answer from" in out and "is the server running" in out
    url = await serving(server(models=("one", "two")))
    code, out, _ = await doctor("--base-url", url)
    assert code == 3 and "one, two" in out and "--model" in out
    code, out, _ = await doctor("--base-url", url, "--model", "two")
    assert code == 0 and "two of one, two" in out
    code, _, errors = await doctor("--model", "two")
    assert code == 2 and "--base-url" in errors
