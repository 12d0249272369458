"""`tokens`: a model server that is given ids and gives ids, so that turn n begins with exactly what was sampled before.

The prompt of each call comes from `Prompts` (the ids of the turn it continues, plus what is new), whatever dialect the agent
speaks. The answer's ids are parsed here, by the renderer: no tool parser of a server touches them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rollyard.core.call import Call, CaptureLevel, Reply
from rollyard.core.errors import REFUSED_FOR_GOOD, ConfigError, ContextFull, PolicyError, Unsupported, UpstreamError
from rollyard.core.log import Log
from rollyard.core.message import Message, Text
from rollyard.core.numbers import check_least
from rollyard.policy.connection import ModelConnection, Timeouts, json_object, resolve_key
from rollyard.policy.model_list import Answer, ModelList
from rollyard.policy.model_server import (
    ServedModel,
    cannot_answer,
    choose_model,
    context_of,
    list_names,
)
from rollyard.policy.prompts import Check, EditedHistory, Prompts
from rollyard.policy.renderers.load import load_shown
from rollyard.policy.renderers.load import renderer as load_renderer
from rollyard.policy.renderers.protocol import Renderer, ShowTools, takes_tools
from rollyard.policy.replicas import Replicas, routing_headers, split_urls
from rollyard.policy.server_probe import (
    PROBE_TOOL,
    ProbeRow,
    ServerProbe,
    context_row,
    hello,
    model_row,
    tokens_row,
)
from rollyard.policy.token_servers import ENGINES, OWNERS, SampledAnswer, TokenRequest, TokenServer, join_answers
from rollyard.policy.trainer_reply import make_reply
from rollyard.policy.upstream_policy import CHECK_S, check_sampling
from rollyard.policy.weight_updates import WeightUpdates

_log = Log("rollyard.policy")
MAX_RESUMES, RESUME_S = 64, 0.05
DEFAULT_MAX_TOKENS = 4096  # for an agent that names none; servers would stop at 16, or only at their context
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SCALE_OUT = "vLLM also serves /inference/v1/generate when started with --enable-scale-out"
ABSENT = (403, 404, 405)  # how servers answer for a route that they do not serve; vLLM says 403
# where nothing was chosen: the whole distribution, said aloud, since servers have truncating defaults of their own
OPEN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


def tokens(
    url: str | Sequence[str],
    model: str | None = None,
    *,
    renderer: Renderer | str | None = None,
    kind: Literal["auto", "vllm", "completions", "sglang", "llamacpp", "torch"] = "auto",
    key: str | None = None,
    key_env: str | None = None,
    max_tokens_cap: int | None = None,
    max_context: int | None = None,
    sampling: Mapping[str, Any] | None = None,
    tools: ShowTools = "template",
    check: Check = "never",
    history: EditedHistory = "keep",
    max_waiting: int | None = None,
    timeouts: Timeouts | None = None,
) -> TokensPolicy:
    """A policy on the server at `url` (with or without `/v1`), or on several that serve the same (see `replicas`).
    `kind="auto"` asks the server what it is; without `model` the only one that it lists is meant, and without `renderer` the
    files of that model, where the server's list says which they are and they are on this machine or the Hub. An answer has at
    most what is left of the server's context (`max_context`), and 4096 tokens where the agent names no number. `sampling`
    overrides what agents ask for; `tools="omit"` leaves out the tools that a chat template has no place for; `check="always"`
    compares every bridge with a full render and counts; `history="strict"` forks where an agent edited an answer. With
    `max_waiting` calls wait here while more than so many wait at the server (see `admission`)."""
    check_least(1, max_tokens_cap=max_tokens_cap, max_context=max_context)
    check_least(0, max_waiting=max_waiting)
    secret = resolve_key(key, key_env)
    return TokensPolicy(
        Replicas([one.removesuffix("/v1") for one in split_urls(url)], max_waiting=max_waiting),
        model,
        PromptSettings(load_shown(renderer, tools), tools, check, history),
        engine=None if kind == "auto" else find_engine(kind),
        connection=ModelConnection(timeouts=timeouts or Timeouts(), secrets=(secret,) if secret else ()),
        headers={"content-type": "application/json"} | ({"authorization": f"Bearer {secret}"} if secret else {}),
        sampling=check_sampling(sampling or {}),
        limits=TokenLimits(max_tokens_cap, max_context),
    )


def find_engine(kind: str) -> TokenServer:
    if kind not in ENGINES:
        raise ConfigError(f"no engine named {kind!r}", hint=f"known: auto, {', '.join(ENGINES)}")
    return ENGINES[kind]


class PromptSettings(NamedTuple):
    """How prompts are made; without a renderer the files of the server's model say it."""

    renderer: Renderer | None
    tools: ShowTools
    check: Check
    history: EditedHistory

    def make(self, renderer: Renderer) -> Prompts:
        return Prompts(renderer, check=self.check, history=self.history)


class TokenLimits(NamedTuple):
    answer: int | None
    context: int | None


class TokensPolicy:
    """A `Policy`. `prompts.counts` says how many prompts were bridged, and why the others were not; `weights` brings servers new
    weights."""

    honours = frozenset({"max_tokens_cap", "seed"})
    text: str | None = None  # that `parse` read

    def __init__(
        self,
        replicas: Replicas,
        model: str | None,
        prompts: PromptSettings,
        *,
        engine: TokenServer | None,
        connection: ModelConnection,
        headers: dict[str, str],
        sampling: Mapping[str, Any],
        limits: TokenLimits,
    ) -> None:
        self.replicas = replicas
        self.root = replicas.urls[0]
        self.model = model
        self.engine = engine
        self._prompt_settings = prompts
        self._prompts = None if prompts.renderer is None else prompts.make(prompts.renderer)
        self.max_context = limits.context
        self.level: CaptureLevel | None = None
        self._cap = limits.answer
        self._sampling = sampling
        self._headers, self._connection = headers, connection
        self.weights = WeightUpdates(replicas.urls, connection, headers, self._engine_name)
        self._list = ModelList(self._ask_for_models, self._refuse_models, CHECK_S)
        self._discovering = asyncio.Lock()

    @property
    def prompts(self) -> Prompts:
        if self._prompts is None:
            raise PolicyError("no renderer was given, and the server was not asked for its model yet")
        return self._prompts

    @property
    def renderer(self) -> Renderer:
        return self.prompts.renderer

    @property
    def version(self) -> int | None:
        """The one published last through this policy."""
        return self.weights.version

    @property
    def takes_tools(self) -> bool | None:
        """None: not known before the server was asked for its model."""
        return None if self._prompts is None else takes_tools(self._prompts.renderer)

    async def __call__(self, call: Call) -> Reply:
        engine = await self._engine_of_call()
        call = self.prompts.prepare(call)
        ask = self._ask(call)
        started = time.time()
        found = await self._sample(call, engine, ask)
        reply = self._reply(call, ask, found, engine, started)
        self.level = reply.capture
        return reply

    async def _sample(self, call: Call, engine: TokenServer, ask: TokenRequest) -> SampledAnswer:
        """One completion. A server that aborts it for new weights is asked to go on from the ids it gave: the parts are one
        completion, each with its own version."""
        found = await self._sample_once(call, engine, ask)
        for _ in range(MAX_RESUMES):
            if not found.aborted:
                return found
            left = ask.max_tokens - len(found.ids)
            if left < 1:
                return msgspec.structs.replace(found, aborted=False, cut=True)
            if not found.ids:
                await asyncio.sleep(RESUME_S)  # it has not begun again yet
            rest = msgspec.structs.replace(ask, prompt=ask.prompt + found.ids, max_tokens=left)
            found = join_answers(found, await self._sample_once(call, engine, rest))
        raise UpstreamError(f"{engine.name} aborted the request {MAX_RESUMES} times", status=503)

    async def _sample_once(self, call: Call, engine: TokenServer, ask: TokenRequest) -> SampledAnswer:
        request = msgspec.json.encode(engine.request(ask))
        headers = self._headers | routing_headers(call.rollout_id)
        version = self.weights.version
        body = await self.replicas.send(call, lambda root: self._connection.post(root + engine.path, request, headers))
        try:
            found = engine.read(json_object(body))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UpstreamError(f"the answer is not {engine.name}'s", status=502, body=body[:4096]) from error
        if not found.spans and found.version is None and version == self.weights.version:
            found = msgspec.structs.replace(found, version=version)  # nothing was published since it was asked
        if found.prompt is not None and found.prompt != ask.prompt:
            flaw = "the engine sampled from other prompt ids than it was given"
            found = msgspec.structs.replace(found, flaws=(*found.flaws, flaw))
        return found

    async def probe(self) -> ServerProbe:
        """What the server gives, in words: a token is sampled. Tool calls and reasoning are read here, not there."""
        reply = await self(hello("default"))
        engine = await self.discover()
        model = self._model_name("default")
        name, advice = self.renderer.name, ""
        try:
            self.renderer.render((Message("user", (Text("Say hi."),)),), (PROBE_TOOL,))
            tools = f"taken, and calls are parsed here, as {name} writes them"
        except Unsupported as error:
            tools, advice = f"refused here: {error.message}", error.hint or ""
        endpoint = ProbeRow("endpoint", engine.path, SCALE_OUT if engine.name == "completions" else "")
        return ServerProbe(
            url=self.root,
            level=reply.capture,
            rows=(
                endpoint,
                model_row(model, list_names(self._models)),
                context_row(self.max_context or context_of(model, self._models)),
                tokens_row(reply.capture, engine.name),
                ProbeRow("tools", tools, advice),
                ProbeRow("thinking", f"parsed here, as {name} writes it"),
            ),
        )

    async def check(self, model: str) -> None:
        """Raise what would make every call fail: no server listens, the key is refused, the model is not there."""
        heard = False
        try:
            await self.discover()
            heard = True
            if not any(served.id == self._model_name(model) for served in self._models):
                async with asyncio.timeout(CHECK_S):
                    await self(hello("default"))
        except UpstreamError as error:
            if not heard or error.status in REFUSED_FOR_GOOD:
                raise cannot_answer(error, self.model or model, self._models) from None
        except TimeoutError:
            return  # it is there, and busy

    async def discover(self) -> TokenServer:
        """Which engine serves here and which models, by its model list, once. Where `kind` was given a server needs no list."""
        await self._list.learn()
        return await self._complete()

    async def _engine_of_call(self) -> TokenServer:
        """A call waits for the list only where nothing can be asked without it."""
        await self._list.learn_for_call()
        return await self._complete()

    async def _complete(self) -> TokenServer:
        """With what the list says, where something was not given."""
        if self.engine is not None and self._prompts is not None:
            return self.engine
        trouble = self._list.trouble
        if trouble is not None and (self.engine is None or not self._list.known):
            raise UpstreamError(trouble.message, status=trouble.status, body=trouble.body)
        async with self._discovering:
            if self._prompts is None:
                self._prompts = await self._load_prompts()
            if self.engine is None:
                self.engine = await self._recognise()
            return self.engine

    async def _engine_name(self) -> str:
        return (await self.discover()).name

    async def _load_prompts(self) -> Prompts:
        """Rendered as the files of the served model say."""
        served = [model for model in self._models if model.root and model.id == (self.model or model.id)]
        root = served[0].root if served else None
        if root is None or not (HUB_NAME.fullmatch(root) or Path(root).is_dir()):  # a server's word is not run as code
            known = "names no files of its model" if root is None else f"has its model in {root!r}, which is not here"
            raise ConfigError(f"{self.root} {known}", hint="pass renderer=: a folder with the model's tokenizer.json")
        settings = self._prompt_settings
        return settings.make(await asyncio.to_thread(load_renderer, root, tools=settings.tools))

    @property
    def _models(self) -> tuple[ServedModel, ...]:
        return self._list.models

    async def _ask_for_models(self) -> Answer:
        return await self.replicas.first(
            lambda root: self._connection.exchange("GET", f"{root}/v1/models", None, self._headers)
        )

    def _refuse_models(self, url: str, status: int, body: bytes) -> UpstreamError:
        return self._connection.refusal(f"{url}/v1/models", status, body)

    async def _recognise(self) -> TokenServer:
        owners = {model.owner for model in self._models}
        known = next((OWNERS[owner] for owner in sorted(owners) if owner in OWNERS), None)
        if known is None:
            owner = ", ".join(repr(owner) for owner in sorted(owners)) or "no model"
            raise ConfigError(f"cannot tell which engine serves {self.root} (owned_by {owner})", hint="pass kind=")
        engine = ENGINES[known]
        if engine.name != "vllm":
            return engine
        _, (status, _, _) = await self.replicas.first(
            lambda root: self._connection.exchange("POST", root + engine.path, b"{}", self._headers)
        )
        if status not in ABSENT:  # a route that exists refuses an empty body
            return engine
        fallback = ENGINES["completions"]
        _log.warning(
            "%s%s answered %d: asking %s instead (vLLM serves the first with --enable-scale-out)",
            *(self.root, engine.path, status, fallback.path),
        )
        return fallback

    def _model_name(self, model: str) -> str:
        """The model that is meant where the agent calls it `asked`."""
        return self.model or choose_model(model, self._models, self.root)

    def _ask(self, call: Call) -> TokenRequest:
        assert call.prompt_ids is not None
        model = call.options.get("model") or self._model_name(call.model)
        context = self.max_context or context_of(model, self._models)
        unset = {name: value for name, value in OPEN.items() if getattr(call.sampling, name) is None}
        own = check_sampling(call.options.get("sampling") or {})
        wanted = msgspec.structs.replace(call.sampling, **{**unset, **self._sampling, **own})
        limit = wanted.max_tokens or DEFAULT_MAX_TOKENS
        for cap in (self._cap, call.options.get("max_tokens_cap")):
            limit = min(limit, cap) if cap is not None else limit
        if context is not None:
            left = context - len(call.prompt_ids)
            if left < 1:
                raise ContextFull(f"the prompt has {len(call.prompt_ids)} tokens; the model's context is {context}")
            limit = min(limit, left)
        return TokenRequest(
            model=model,
            prompt=call.prompt_ids,
            sampling=msgspec.structs.replace(wanted, max_tokens=limit, logprobs=True),
            max_tokens=limit,
            stop_ids=self.renderer.stop_ids,
        )

    def _reply(self, call: Call, ask: TokenRequest, found: SampledAnswer, engine: TokenServer, started: float) -> Reply:
        reply = make_reply(
            call, found.ids, found.logprobs, self.renderer, cut=found.cut, flaws=found.flaws, experts=found.experts
        )
        spans = found.spans
        return msgspec.structs.replace(
            reply,
            model=ask.model,
            sampling=ask.sampling,
            stop_reason=found.stop_reason,
            logprobs_mode=found.mode,
            version_start=spans[0].version if spans and not spans[0].start else found.version,
            version_end=spans[-1].version if spans else found.version,
            spans=spans,
            engine={**found.engine, "kind": engine.name, "url": self.root, "renderer": self.renderer.name},
            started_at=started,
            finished_at=time.time(),
        )

    def counters(self) -> dict[str, int]:
        """For the gate's metrics: how prompts came about, and which server answered."""
        return {**({} if self._prompts is None else self._prompts.counts), **self.replicas.counts}

    async def closed(self, rollout_id: str) -> None:
        self.replicas.forget(rollout_id)

    async def aclose(self) -> None:
        await self.replicas.aclose()
        await self._connection.aclose()
