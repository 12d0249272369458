"""`rollyard serve model`: a small model server with exact tokens, for tests and examples.

Token in, token out (`/inference/v1/generate`, `/v1/completions`), a chat API (`/v1/chat/completions`), new weights while it
runs (`POST /weights`), a version with every token, pause and resume in vLLM's modes. What it is not: fast. It runs the tiny
model of this package on one machine; a real model wants vLLM or SGLang, which answer the same requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.call import Call, PauseMode, Reply, ids
from rollyard.core.errors import BadRequest, ConfigError, Error, PolicyError
from rollyard.core.ids import new_id
from rollyard.policy.renderers.protocol import Renderer
from rollyard.policy.trainer_reply import make_reply
from rollyard.train.sampler import Sampler, SampleRequest, SamplerOutput
from rollyard.train.tiny import load_weights
from rollyard.wire import CODECS
from rollyard.wire.codec import WireRequest as WireRequest

MODE = "processed"


class NewWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /weights`. `mode` is for answers under way."""

    path: str
    version: int
    mode: PauseMode = "keep"


class ModelServer:
    """The routes of one sampler. `app` is an ASGI application."""

    def __init__(self, sampler: Sampler, renderer: Renderer, *, name: str = "tiny", key: str | None = None) -> None:
        self.sampler = sampler
        self.renderer = renderer
        self.name = name
        self._key = key
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.guard(self.models)),
                Route("/inference/v1/generate", self.guard(self.generate), methods=["POST"]),
                Route("/v1/completions", self.guard(self.completions), methods=["POST"]),
                Route("/v1/chat/completions", self.guard(self.chat), methods=["POST"]),
                Route("/weights", self.guard(self.weights), methods=["POST"]),
                Route("/weight_version", self.guard(self.version)),
                Route("/pause", self.guard(self.pause), methods=["POST"]),
                Route("/resume", self.guard(self.resume), methods=["POST"]),
                Route("/is_paused", self.guard(self.is_paused)),
            ]
        )

    def guard(self, route: Any) -> Any:
        async def answer(request: HttpRequest) -> Response:
            if self._key is not None and request.headers.get("authorization") != f"Bearer {self._key}":
                return refusal(401, "the key is missing or wrong")
            try:
                return await route(request)
            except (ValueError, TypeError, KeyError, msgspec.ValidationError, BadRequest, ConfigError) as error:
                return refusal(400, error.message if isinstance(error, Error) else str(error))
            except (PolicyError, TimeoutError) as error:
                return refusal(500, str(error) or type(error).__name__)

        return answer

    async def health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: HttpRequest) -> Response:
        listed = {"id": self.name, "object": "model", "owned_by": "rollyard"}
        return JSONResponse({"object": "list", "data": [listed | {"max_model_len": self.sampler.model.config.context}]})

    async def generate(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        prompt, params = ids(body["token_ids"]), body.get("sampling_params") or {}
        sampled = await self.sampler.sample(read_request(prompt, params, self.renderer.stop_ids))
        return JSONResponse(
            {
                "request_id": new_id("gen"),
                "choices": [self.choice(sampled)],
                "prompt_token_ids": prompt.tolist(),
                "logprobs_mode": MODE,
            }
        )

    async def completions(self, request: HttpRequest) -> Response:
        body = await json_body(request)
        prompt = body.get("prompt")
        if not isinstance(prompt, list):
            raise ValueError("prompt must be a list of token ids")
        sampled = await self.sampler.sample(read_request(ids(prompt), body, self.renderer.stop_ids))
        texts = [self.renderer.decode(ids((token,))) for token in sampled.ids]
        choice = {
            "index": 0,
            "text": "".join(texts),
            "token_ids": sampled.ids.tolist(),
            "prompt_token_ids": prompt,
            "logprobs": {"tokens": texts, "token_logprobs": sampled.logprobs.tolist()},
            "finish_reason": sampled.finish,
            "weight_versions": labelled_spans(sampled),
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled.ids)}
        return JSONResponse(
            {"id": new_id("cmpl"), "object": "text_completion", "model": self.name, "choices": [choice], "usage": usage}
        )

    async def chat(self, request: HttpRequest) -> Response:
        codec = CODECS["chat"]
        body = await request.body()
        call = codec.decode(WireRequest(call_id=new_id("chat"), rollout_id="chat", body=body, headers={}))
        call = msgspec.structs.replace(call, prompt_ids=self.renderer.render(call.messages, call.tools))
        sampled = await self.sampler.sample(self.chat_request(call))
        reply = make_reply(call, sampled.ids, sampled.logprobs, self.renderer, cut=sampled.finish != "stop")
        reply = msgspec.structs.replace(reply, model=self.name)
        if call.stream:
            return Response(b"".join(codec.stream(call, reply)), media_type=codec.stream_type(call))
        return JSONResponse(with_ids(msgspec.json.decode(codec.encode(call, reply)), body, reply, sampled))

    def chat_request(self, call: Call) -> SampleRequest:
        assert call.prompt_ids is not None
        left = self.sampler.model.config.context - len(call.prompt_ids)
        s = call.sampling
        params = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p, "seed": s.seed}
        return read_request(
            call.prompt_ids, params | {"max_tokens": min(s.max_tokens or left, left)}, self.renderer.stop_ids
        )

    async def weights(self, request: HttpRequest) -> Response:
        wanted = msgspec.convert(await json_body(request), NewWeights)
        await self.sampler.load(load_weights(Path(wanted.path)), wanted.version, mode=wanted.mode)
        return JSONResponse({"weight_version": self.sampler.version})

    async def version(self, request: HttpRequest) -> Response:
        return JSONResponse({"weight_version": self.sampler.version})

    async def pause(self, request: HttpRequest) -> Response:
        await self.sampler.pause(msgspec.convert(request.query_params.get("mode", "abort"), PauseMode))
        return JSONResponse({"status": "paused"})

    async def resume(self, request: HttpRequest) -> Response:
        self.sampler.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: HttpRequest) -> Response:
        return JSONResponse({"is_paused": self.sampler.paused is not None})

    def choice(self, sampled: SamplerOutput) -> dict[str, Any]:
        entries = [
            {"token": self.renderer.decode(ids((token,))), "logprob": value}
            for token, value in zip(sampled.ids, sampled.logprobs, strict=True)
        ]
        return {
            "index": 0,
            "token_ids": sampled.ids.tolist(),
            "logprobs": {"content": entries},
            "finish_reason": sampled.finish,
            "weight_versions": labelled_spans(sampled),
        }


def read_request(prompt: array[int], params: Mapping[str, Any], stops: tuple[int, ...]) -> SampleRequest:
    kinds = (("temperature", float), ("top_p", float), ("min_p", float), ("top_k", int), ("seed", int))
    given: dict[str, Any] = {name: kind(params[name]) for name, kind in kinds if params.get(name) is not None}
    own = params.get("stop_token_ids")
    return SampleRequest(
        prompt=prompt,
        max_tokens=int(params.get("max_tokens") or 16),
        stop_ids=tuple(own) if own is not None else stops,
        **given,
    )


def labelled_spans(sampled: SamplerOutput) -> list[dict[str, Any]]:
    """As vLLM writes them: a version is a label."""
    return [{"version": str(span.version), "start": span.start, "end": span.end} for span in sampled.spans]


def versions(sampled: SamplerOutput) -> dict[str, Any]:
    spans = [[span.version, span.start, span.end] for span in sampled.spans]
    return {"weight_version": spans[-1][0] if spans else None, "weight_versions": spans}


def with_ids(answer: dict[str, Any], body: bytes, reply: Reply, sampled: SamplerOutput) -> dict[str, Any]:
    """The ids beside the chat answer, for a client that asked for them."""
    if not msgspec.json.decode(body).get("return_token_ids"):
        return answer
    assert reply.prompt_ids is not None
    answer["prompt_token_ids"] = reply.prompt_ids.tolist()
    answer["choices"][0]["token_ids"] = sampled.ids.tolist()
    answer["choices"][0]["meta_info"] = versions(sampled)
    return answer


async def json_body(request: HttpRequest) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(await request.body())
    except BAD_JSON as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("the body must be a JSON object")
    return value


def refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)
