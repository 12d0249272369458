"""Batched sampling with exact ids, logprobs and versions.

Requests that come within a few milliseconds of each other are one batch. The logprob of a token is that of the distribution
it was drawn from (temperature and truncation applied), which is what an importance ratio needs. New weights are taken
between two tokens: the tokens before and after carry their own version, and nothing is thrown away.

A pause has vLLM's three modes for what is under way: `abort` ends it with the tokens that it has (a client goes on from them),
`wait` lets it end, `keep` stops it between two tokens. What has not begun waits in each. New weights also compute anew what an
answer has so far, so that the logprob of every token is that of its version.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from rollyard.core.call import PauseMode, VersionSpan, floats, ids
from rollyard.core.errors import PolicyError
from rollyard.train.tiny import Cache, TinyModel

SeedSpace = 2**63 - 1


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt: array[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None


class SamplerOutput(msgspec.Struct, frozen=True, kw_only=True):
    ids: array[int]
    logprobs: array[float]
    spans: tuple[VersionSpan, ...]
    finish: Literal["stop", "length", "abort"]


class Row:
    """One request on its way."""

    def __init__(self, request: SampleRequest, answer: asyncio.Future[SamplerOutput]) -> None:
        self.request = request
        self.answer = answer
        self.ids = ids()
        self.logprobs = floats()
        self.versions: list[int] = []
        self.random = torch.Generator()
        if request.seed is None:
            self.random.seed()
        else:
            self.random.manual_seed(request.seed & SeedSpace)

    def done(self) -> bool:
        return len(self.ids) >= self.request.max_tokens or bool(self.ids and self.ids[-1] in self.request.stop_ids)

    def output(self, finish: Literal["stop", "length", "abort"] | None = None) -> SamplerOutput:
        stopped = bool(self.ids) and self.ids[-1] in self.request.stop_ids
        spans: list[VersionSpan] = []
        for at, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version, spans[-1].start, at + 1)
            else:
                spans.append(VersionSpan(version, at, at + 1))
        return SamplerOutput(
            ids=self.ids,
            logprobs=self.logprobs,
            spans=tuple(spans),
            finish=finish or ("stop" if stopped else "length"),
        )


class Sampler:
    """`async with Sampler(model)`: answers `sample` calls from one loop; torch runs in a worker thread."""

    def __init__(self, model: TinyModel, *, version: int = 0, max_batch: int = 64, gather_s: float = 0.005) -> None:
        self.model = model
        self.version = version
        self.batches = 0
        self.tokens = 0  # sampled since the start
        self._max_batch = max_batch
        self._gather_s = gather_s
        self._waiting: asyncio.Queue[Row] = asyncio.Queue()
        self._going = asyncio.Event()
        self._going.set()
        self._pausing, self._loading = asyncio.Lock(), asyncio.Lock()
        self._changed = asyncio.Event()  # set whenever what is under way has ended or stands still
        self._hold = threading.Condition()  # guards the next two, which the worker's thread reads between two tokens
        self._mode: PauseMode | None = None
        self._still = False  # the worker stands between two tokens
        self._busy = False
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Sampler:
        self._work = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._work is not None
        await self.pause("abort")
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)

    async def sample(self, request: SampleRequest, timeout: float = 600.0) -> SamplerOutput:
        limit = self.model.config.context
        if not request.prompt or request.max_tokens < 1:
            raise ValueError("a prompt and max_tokens of at least 1 are needed")
        if len(request.prompt) + request.max_tokens > limit:
            raise ValueError(f"{len(request.prompt)} prompt tokens and max_tokens {request.max_tokens} exceed {limit}")
        if max(request.prompt) >= self.model.config.vocabulary or min(request.prompt) < 0:
            raise ValueError(f"an id is outside the vocabulary of {self.model.config.vocabulary}")
        row = Row(request, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(row)
        async with asyncio.timeout(timeout):
            return await row.answer

    async def pause(self, mode: PauseMode = "abort", timeout: float = 600.0) -> None:
        """Ends once nothing is computed any more; what has not begun waits for `resume`."""
        async with self._pausing, asyncio.timeout(timeout):
            self._going.clear()
            self._set_mode(mode)
            while self._busy and not self._still:
                self._changed.clear()
                await self._changed.wait()

    @property
    def paused(self) -> PauseMode | None:
        """How, or None where it goes on."""
        return self._mode

    def resume(self) -> None:
        self._set_mode(None)
        self._going.set()

    async def load(self, weights: dict[str, Any], version: int, *, mode: PauseMode = "keep") -> None:
        """New weights for all that is sampled from now on; a pause that was there before stays."""
        shapes = {name: value.shape for name, value in self.model.state_dict().items()}
        if {name: value.shape for name, value in weights.items()} != shapes:
            raise ValueError("these weights are those of another model: their names or shapes differ")
        async with self._loading:
            going = self._going.is_set()
            await self.pause(mode if going else self._mode or mode)  # one that is on its way is waited for
            self.model.load_state_dict(weights)
            self.version = version
            if going:
                self.resume()

    def _set_mode(self, mode: PauseMode | None) -> None:
        with self._hold:
            self._mode, self._still = mode, False
            self._hold.notify_all()

    def _wait_while_paused(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Between two tokens: stands still for as long as a pause keeps what is under way; True when that is to end."""
        with self._hold:
            while self._mode == "keep":
                self._still = True
                loop.call_soon_threadsafe(self._changed.set)
                self._hold.wait()
            return self._mode == "abort"

    async def _run(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            await asyncio.sleep(self._gather_s)
            while not self._going.is_set():  # a pause may come again before this task runs
                await self._going.wait()
            while len(batch) < self._max_batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            live = [row for row in batch if not row.answer.done()]
            if live:
                self.batches += 1
                await self._answer(live)

    async def _answer(self, rows: list[Row]) -> None:
        self._busy = True
        loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._generate, rows, loop)
        except (RuntimeError, ValueError, IndexError) as error:
            for row in rows:
                if not row.answer.done():
                    row.answer.set_exception(PolicyError(f"sampling failed: {error}"))
        finally:
            self._busy = False
            self._changed.set()

    def _generate(self, rows: list[Row], loop: asyncio.AbstractEventLoop) -> None:
        """Token by token until every row is done; finished rows leave the batch."""
        tokens, real = pad([row.request.prompt for row in rows])
        cache: Cache = []
        version = self.version
        with torch.inference_mode():
            while rows:
                if self._wait_while_paused(loop):
                    for row in rows:
                        settle(loop, row, row.output("abort"))
                    return
                if version != self.version:  # the cache is of other weights
                    version, cache = self.version, []
                    tokens, real = pad([row.request.prompt + row.ids for row in rows])
                logits, cache = self.model(tokens, real, cache, last=True)
                drawn = [draw(logits[n, -1], row) for n, row in enumerate(rows)]
                for row, (token, logprob) in zip(rows, drawn, strict=True):
                    row.ids.append(token)
                    row.logprobs.append(logprob)
                    row.versions.append(self.version)
                self.tokens += len(rows)
                keep = [n for n, row in enumerate(rows) if not row.done() and not row.answer.cancelled()]
                for n, row in enumerate(rows):
                    if n not in keep:
                        settle(loop, row, row.output())
                if not keep:
                    return
                if len(keep) < len(rows):
                    index = torch.tensor(keep)
                    cache = [(k[index], v[index]) for k, v in cache]
                    real, rows = real[index], [rows[n] for n in keep]
                tokens = torch.tensor([[row.ids[-1]] for row in rows])
                real = torch.cat((real, torch.ones(len(rows), 1, dtype=torch.bool)), 1)


def settle(loop: asyncio.AbstractEventLoop, row: Row, sampled: SamplerOutput) -> None:
    loop.call_soon_threadsafe(lambda: None if row.answer.done() else row.answer.set_result(sampled))


def pad(prompts: list[array[int]]) -> tuple[Tensor, Tensor]:
    """Prompts side by side, padding on the left."""
    longest = max(len(p) for p in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    real = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for n, prompt in enumerate(prompts):
        tokens[n, longest - len(prompt) :] = torch.tensor(prompt.tolist())
        real[n, longest - len(prompt) :] = True
    return tokens, real


def draw(logits: Tensor, row: Row) -> tuple[int, float]:
    """A token and its logprob under the distribution it was drawn from; at temperature 0 the best one, under the model's."""
    request = row.request
    if request.temperature <= 0:
        scores = logits.float().log_softmax(-1)
        best = int(scores.argmax())
        return best, min(0.0, float(scores[best]))
    scores = truncate((logits.float() / request.temperature).log_softmax(-1), request)
    token = int(torch.multinomial(scores.exp(), 1, generator=row.random))
    return token, min(0.0, float(scores[token]))


def truncate(scores: Tensor, request: SampleRequest) -> Tensor:
    """Logprobs with top-k, top-p and min-p applied, normalised again."""
    if request.top_k <= 0 and request.top_p >= 1.0 and request.min_p <= 0.0:
        return scores
    ordered, places = scores.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if request.top_k > 0:
        keep[request.top_k :] = False
    if request.top_p < 1.0:
        keep &= ordered.exp().cumsum(-1) - ordered.exp() < request.top_p
    if request.min_p > 0.0:
        keep &= ordered >= ordered[0] + torch.tensor(request.min_p).log()
    cut = torch.full_like(scores, float("-inf"))
    cut[places[keep]] = scores[places[keep]]
    return cut.log_softmax(-1)
