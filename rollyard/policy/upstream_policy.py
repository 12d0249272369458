"""`upstream`: another model server answers, and everything it gives about its tokens is kept (`transparent_proxy`).

Calls go out non-streaming, whatever the agent asked for: engines lose token ids in streams. Logprobs and ids are asked for
with each request; a server that refuses the extra fields is found out once (a 400 that goes away with fewer of them), and
the level it does give is shown. What the agent asked for stays in the call; what was really sent is `Reply.sampling`.
Nothing is retried: a refusal is relayed with its status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from rollyard.core.call import NO_THINKING, Call, CaptureLevel, Dialect, Reply, Sampling
from rollyard.core.errors import REFUSED_FOR_GOOD, ConfigError, PolicyError, UpstreamError
from rollyard.core.numbers import check_least
from rollyard.policy.connection import ModelConnection, Timeouts, check_url, origin, resolve_key
from rollyard.policy.evidence import level_of
from rollyard.policy.model_list import Answer, ModelList
from rollyard.policy.model_server import (
    ServedModel,
    cannot_answer,
    choose_model,
    context_of,
    list_names,
    owner_of,
    show_url,
)
from rollyard.policy.replicas import Replicas, routing_headers, split_urls
from rollyard.policy.server_probe import (
    PROBE_TOKENS,
    PROBE_TOOL,
    ProbeRow,
    ServerProbe,
    context_row,
    hello,
    model_row,
    thinking_row,
    tokens_row,
    tools_row,
)
from rollyard.wire import CODECS
from rollyard.wire.codec import Codec, Memo
from rollyard.wire.route import model_in_path

Speaks = Literal["auto", "chat", "completions", "messages", "responses", "gemini"]
REFUSED = (400, 422)  # statuses with which servers refuse a field they do not know
MODELS_S, CHECK_S = 10.0, 60.0  # for the model list, and for the one token of a check
_PLAN = b"request plan"  # its key in a memo
MAX_KNOWN = 256  # (url, model) pairs whose abilities are remembered


_CALL_OPTIONS = {"disable_thinking", "max_tokens_cap", "top_logprobs", "seed"}
# what a dialect has no member for
_ABSENT: dict[Dialect, set[str]] = {"messages": {"top_logprobs", "seed"}, "responses": {"seed"}}


class TokenFields(msgspec.Struct, frozen=True):
    """What is asked for about tokens, beyond the text."""

    ids: bool
    logprobs: bool


class UpstreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str | None
    dialect: Dialect
    top_logprobs: int
    token_ids: bool
    max_tokens_cap: int | None
    disable_thinking: bool
    sampling: Mapping[str, Any]
    alternatives: int | None = None  # of a session, instead of `top_logprobs`


def upstream(
    url: str | Sequence[str],
    model: str | None = None,
    *,
    key: str | None = None,
    key_env: str | None = None,
    dialect: Speaks = "auto",
    top_logprobs: int = 5,
    token_ids: bool = True,
    max_tokens_cap: int | None = None,
    disable_thinking: bool = False,
    sampling: Mapping[str, Any] | None = None,
    max_waiting: int | None = None,
    timeouts: Timeouts | None = None,
) -> Upstream:
    """A policy that relays to the server at `url` (what an OpenAI client is given: it ends in `/v1`), or to several that serve
    the same: see `replicas`.

    `model` replaces the model of every call, side calls too. Without it a call's own model is asked for where the server
    lists it (or has no list), else the only model that it lists. Without `max_tokens_cap` an answer has at most half of the
    context that the server's list names (`max_model_len`), if it names one. `sampling` overrides what agents ask for, by the
    field names of `Sampling`; for training set `dict(temperature=1.0, top_p=1.0, top_k=-1)` or what the trainer assumes.
    With `max_waiting` calls wait here while more than so many wait at the server (see `admission`).
    """
    check_least(1, max_tokens_cap=max_tokens_cap)
    check_least(0, top_logprobs=top_logprobs, max_waiting=max_waiting)
    urls = split_urls(url)
    settings = UpstreamSettings(
        url=urls[0],
        model=model,
        dialect=dialect_of(urls[0]) if dialect == "auto" else dialect,
        top_logprobs=top_logprobs,
        token_ids=token_ids,
        max_tokens_cap=max_tokens_cap,
        disable_thinking=disable_thinking,
        sampling=check_sampling(sampling or {}),
    )
    return Upstream(
        settings, Replicas(urls, max_waiting=max_waiting), resolve_key(key, key_env), timeouts or Timeouts()
    )


class Upstream:
    """A `Policy`. `level` is what the server was seen to give; None before its first answer."""

    text: str | None = None  # that `parse` read

    def __init__(self, settings: UpstreamSettings, replicas: Replicas, key: str | None, timeouts: Timeouts) -> None:
        self.settings = settings
        self.replicas = replicas
        self.level: CaptureLevel | None = None
        self._key = key
        self._connection = ModelConnection(timeouts=timeouts, secrets=(key,) if key else ())
        self._accepted: dict[tuple[str, str], TokenFields] = {}
        self._list = ModelList(self._ask_for_models, self._refuse_models, MODELS_S)
        self._fitted: dict[str, UpstreamSettings] = {}  # by the model asked for, once the server's list is known
        self._memos: dict[str, Memo] = {}  # by rollout: what its turns before asked, and their prompt ids

    @property
    def _models(self) -> tuple[ServedModel, ...]:
        return self._list.models

    @property
    def honours(self) -> frozenset[str]:
        return frozenset(_CALL_OPTIONS - _ABSENT.get(self.settings.dialect, set()))

    async def __call__(self, call: Call) -> Reply:
        wanted = session_settings(self.settings, call.options)
        settings = self._fitted.get(call.model) if wanted is self.settings else None
        if settings is None:
            settings = await self._fit(wanted, call.model)
        server = (settings.url, settings.model or call.model)
        if (known := self._accepted.get(server)) is not None:
            return await self._ask(call, settings, known)
        refusal: UpstreamError | None = None
        for asks in list_fallbacks(settings):
            try:
                reply = await self._ask(call, settings, asks)
            except UpstreamError as error:
                if error.status not in REFUSED:
                    raise
                refusal = refusal or error  # the fullest request's refusal says most, if all are refused
                continue
            if len(self._accepted) >= MAX_KNOWN:
                self._accepted.clear()
            self._accepted[server] = asks
            return reply
        assert refusal is not None
        raise refusal

    async def probe(self) -> ServerProbe:
        """What the server gives, in words: it is asked for a few tokens, and with a tool."""
        reply = await self(hello("default", tokens=PROBE_TOKENS))
        refused: UpstreamError | None = None
        try:
            await self(hello("default", tools=(PROBE_TOOL,)))
        except UpstreamError as error:
            refused = error
        settings = await self._fit(self.settings, "default")
        model = settings.model or reply.model or "default"
        owner = owner_of(model, self._models)
        return ServerProbe(
            url=settings.url,
            level=reply.capture,
            rows=(
                ProbeRow("endpoint", CODECS[settings.dialect].upstream_path.format(model=model)),
                model_row(model, list_names(self._models)),
                context_row(context_of(model, self._models)),
                tokens_row(reply.capture, owner),
                tools_row(refused, owner),
                thinking_row(reply, owner),
            ),
        )

    async def check(self, model: str) -> None:
        """Raise what would make every call fail: no listener, the key is refused, the model is not there."""
        heard = False
        try:
            await self._list.learn()
            heard = True
            named = (await self._fit(self.settings, model)).model or model
            if not any(served.id == named for served in self._models):
                async with asyncio.timeout(CHECK_S):
                    await self(hello(model))
        except UpstreamError as error:
            if not heard or error.status in REFUSED_FOR_GOOD:
                raise cannot_answer(error, self.settings.model or model, self._models) from None
        except TimeoutError:
            return  # it is there, and busy

    async def _fit(self, settings: UpstreamSettings, model: str) -> UpstreamSettings:
        """With what the server's model list says: the model, where none was chosen, and the cap of its context."""
        if settings.url != self.settings.url:
            return settings  # a session's own server
        if not self._list.known:
            await self._list.learn_for_call()
            if not self._list.known:
                return settings
        if settings is not self.settings:
            return self._apply_list(settings, model)
        found = self._fitted.get(model)
        if found is None:
            if len(self._fitted) >= MAX_KNOWN:
                self._fitted.clear()
            found = self._fitted[model] = self._apply_list(settings, model)
        return found

    def _apply_list(self, settings: UpstreamSettings, sampling: str) -> UpstreamSettings:
        if settings.model is None and settings.dialect == "gemini" and not self._models:
            raise ConfigError(
                f"{show_url(settings.url)} names the model in its paths and lists none to choose from",
                hint="name the model with model= (on the command line --model)",
            )
        model = settings.model or choose_model(sampling, self._models, settings.url)
        cap, context = settings.max_tokens_cap, context_of(model, self._models)
        if cap is None and context is not None:
            cap = max(1, context // 2)
        return msgspec.structs.replace(settings, model=model, max_tokens_cap=cap)

    async def _ask_for_models(self) -> Answer:
        headers = headers_of(CODECS[self.settings.dialect], self._key)
        every = "?pageSize=1000" if self.settings.dialect == "gemini" else ""
        return await self.replicas.first(
            lambda base: self._connection.exchange("GET", f"{base}/models{every}", None, headers)
        )

    def _refuse_models(self, url: str, status: int, body: bytes) -> UpstreamError:
        return self._connection.refusal(f"{url}/models", status, body)

    async def _ask(self, call: Call, settings: UpstreamSettings, asks: TokenFields) -> Reply:
        codec = CODECS[settings.dialect]
        model = settings.model or call.model
        memo = self._memos.setdefault(call.rollout_id, {})
        plan: RequestPlan | None = memo.get(_PLAN)
        if plan is None or plan.settings is not settings or plan.asks is not asks or plan.asked != call.sampling:
            plan = memo[_PLAN] = plan_request(call.sampling, settings, asks)
        sent = plan.sampling
        body = codec.encode_request(call, model=model, sampling=sent, extra=plan.extra, memo=memo)
        key = self._key_for(settings.url, call.options)
        path = codec.upstream_path
        if "{model}" in path:
            path = path.format(model=model_in_path(model))
        started = time.time()
        headers = _call_headers(codec.name, key, call.rollout_id)
        replicas = self.replicas if settings.url == self.settings.url else Replicas([settings.url])
        answer = await replicas.send(call, lambda base: self._connection.post(base + path, body, headers, key))
        reply = self._decode(codec, answer, call, memo)
        reply = msgspec.structs.replace(
            reply,
            capture=level_of(reply),
            sampling=sent,
            engine={**reply.engine, "kind": "upstream", "url": settings.url, "dialect": codec.name},
            started_at=started,
            finished_at=time.time(),
        )
        self.level = reply.capture
        return reply

    def _decode(self, codec: Codec, answer: bytes, call: Call, memo: Memo) -> Reply:
        try:
            return codec.decode_reply(answer, call, memo)
        except UpstreamError:
            raise
        except (PolicyError, msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
            raise UpstreamError(
                f"the upstream's answer is not a {codec.name} reply", status=502, body=self._connection.scrub(answer)
            ) from error

    def _key_for(self, url: str, options: Mapping[str, Any]) -> str | None:
        """A session's own key for its own server; ours never goes to another origin."""
        if options.get("api_key"):
            return str(options["api_key"])
        return self._key if url == self.settings.url or origin(url) == origin(self.settings.url) else None

    def counters(self) -> dict[str, int]:
        """For the gate's metrics: which server answered."""
        return dict(self.replicas.counts)

    async def closed(self, rollout_id: str) -> None:
        self._memos.pop(rollout_id, None)
        self.replicas.forget(rollout_id)

    async def aclose(self) -> None:
        await self.replicas.aclose()
        await self._connection.aclose()


def list_fallbacks(settings: UpstreamSettings) -> tuple[TokenFields, ...]:
    """From everything wanted down to plain text; the first that a server accepts is kept."""
    logprobs = settings.top_logprobs > 0 or settings.alternatives is not None
    return tuple(
        dict.fromkeys(
            (TokenFields(settings.token_ids, logprobs), TokenFields(False, logprobs), TokenFields(False, False))
        )
    )


def dialect_of(url: str) -> Dialect:
    """The dialect that a well-known address speaks; chat completions everywhere else."""
    parts = urlsplit(url)
    if parts.hostname == "api.anthropic.com":
        return "messages"
    if parts.hostname == "generativelanguage.googleapis.com" and "/openai" not in parts.path:
        return "gemini"
    return "chat"


def check_sampling(overrides: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(overrides) - set(Sampling.__struct_fields__)
    if unknown:
        raise ConfigError(
            f"not sampling parameters: {', '.join(sorted(unknown))}",
            hint=f"known: {', '.join(Sampling.__struct_fields__)}; others go under extra",
        )
    return dict(overrides)


_SESSION_FIELDS = {
    "model": "model",
    "max_tokens_cap": "max_tokens_cap",
    "top_logprobs": "alternatives",
    "base_url": "url",
}


def session_settings(settings: UpstreamSettings, options: Mapping[str, Any]) -> UpstreamSettings:
    """A session may override the policy's settings (`Call.options`)."""
    if not options:
        return settings
    changes: dict[str, Any] = {}
    for option, field in _SESSION_FIELDS.items():
        if options.get(option) is not None:
            changes[field] = options[option]
    if options.get("disable_thinking") is not None:
        changes["disable_thinking"] = bool(options["disable_thinking"])
    if options.get("sampling"):
        changes["sampling"] = {**settings.sampling, **check_sampling(options["sampling"])}
    if "url" in changes:
        changes["url"] = check_url(str(changes["url"]))
    return msgspec.structs.replace(settings, **changes) if changes else settings


def effective_sampling(sampling: Sampling, settings: UpstreamSettings, asks: TokenFields) -> Sampling:
    changes = dict(settings.sampling)
    if "extra" in changes:
        changes["extra"] = {**sampling.extra, **changes["extra"]}
    if settings.max_tokens_cap is not None:
        wanted = changes.get("max_tokens", sampling.max_tokens)
        changes["max_tokens"] = min(wanted or settings.max_tokens_cap, settings.max_tokens_cap)
    if asks.logprobs:
        changes["logprobs"] = True
        own = settings.top_logprobs if settings.alternatives is None else settings.alternatives
        changes["top_logprobs"] = max(own, sampling.top_logprobs or 0)
    if settings.disable_thinking:
        changes["reasoning"] = NO_THINKING
    return msgspec.structs.replace(sampling, **changes) if changes else sampling


class RequestPlan(NamedTuple):
    """What is sent for what an agent asked; the same for most calls of a rollout."""

    settings: UpstreamSettings
    asks: TokenFields
    asked: Sampling
    sampling: Sampling
    extra: Mapping[str, Any]


def plan_request(sampling: Sampling, settings: UpstreamSettings, asks: TokenFields) -> RequestPlan:
    return RequestPlan(
        settings, asks, sampling, effective_sampling(sampling, settings, asks), extra_fields(settings, asks)
    )


def extra_fields(settings: UpstreamSettings, asks: TokenFields) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if settings.dialect in ("chat", "completions") and asks.ids:
        extra |= {"return_token_ids": True, "return_prompt_token_ids": True}
    if settings.dialect == "chat" and settings.disable_thinking:
        extra["chat_template_kwargs"] = {"enable_thinking": False}
    return extra


@lru_cache(maxsize=4096)
def _call_headers(dialect: Dialect, key: str | None, rollout_id: str) -> Mapping[str, str]:
    """The same for every call of a rollout."""
    return headers_of(CODECS[dialect], key) | routing_headers(rollout_id)


def headers_of(codec: Codec, key: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json", "accept": "application/json"}
    if codec.name == "messages":
        headers["anthropic-version"] = "2023-06-01"
    if key is None:
        return headers
    if codec.name == "messages":
        headers["x-api-key"] = key
    elif codec.name == "gemini":
        headers["x-goog-api-key"] = key
    else:
        headers["authorization"] = f"Bearer {key}"
    return headers
