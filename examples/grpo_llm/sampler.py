"""Sampling for many agents at once: a request takes a free slot of the cache as soon as there is one, and leaves it when done.

Tokens are drawn at temperature 1 from the whole distribution, so the logprob of a token is the model's own. On a GPU one step
of all slots is recorded once as a CUDA graph and replayed. Weights change between two steps of training, when no request is
under way, so a reply has one version.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from array import array
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from examples.grpo_llm.llama import Llama, Slots
from rollyard.core.call import floats, ids

IDLE_S = 0.05


class Sampled(msgspec.Struct, frozen=True):
    ids: array[int]
    logprobs: array[float]
    version: int


class Request:
    def __init__(self, prompt: Sequence[int], max_tokens: int) -> None:
        self.prompt = list(prompt)
        self.max_tokens = max_tokens
        self.ids = ids()
        self.logprobs = floats()
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Sampled] = self.loop.create_future()

    def settle(self, outcome: Sampled | BaseException) -> None:
        """From the sampler's thread."""

        def end() -> None:
            if self.answer.done():
                return
            if isinstance(outcome, Sampled):
                self.answer.set_result(outcome)
            else:
                self.answer.set_exception(outcome)

        self.loop.call_soon_threadsafe(end)


class SlotSampler:
    """`async with SlotSampler(model, ...)`. The model is the trainer's own, which must not train while requests are out."""

    def __init__(self, model: Llama, *, stop_ids: Sequence[int], slots: int = 64, length: int = 512) -> None:
        self.model = model
        self.version = 0
        self.tokens = 0  # sampled since the start
        self._stops = frozenset(stop_ids)
        device = model.device
        self._slots = Slots(model.config, slots, length, device)
        self._last = torch.zeros(slots, dtype=torch.long, device=device)
        self._places = torch.zeros(slots, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(slots, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._live: dict[int, Request] = {}
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    async def __aenter__(self) -> SlotSampler:
        await asyncio.to_thread(self._prepare)
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join)

    async def sample(self, prompt: Sequence[int], max_tokens: int) -> Sampled:
        if len(prompt) + max_tokens > self._slots.length:
            raise ValueError(f"{len(prompt)} prompt tokens and {max_tokens} more exceed {self._slots.length}")
        request = Request(prompt, max_tokens)
        self._waiting.put(request)
        return await request.answer

    @torch.inference_mode()
    def _prepare(self) -> None:
        if self.model.device.type != "cuda":
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph

    def _step(self) -> None:
        """One more token in every slot, used or not: its tensors stay where they are."""
        logits = self.model.decode(self._last, self._places, self._slots)
        drawn, logprobs = draw(logits)
        self._last.copy_(drawn)
        self._logprobs.copy_(logprobs)
        self._places.add_(1).clamp_(max=self._slots.length - 1)

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while self._admit():
                if self._live:
                    if self._graph is None:
                        self._step()
                    else:
                        self._graph.replay()
                    self._note(self._live)
        except BaseException as error:  # cancelled too: no caller may wait for an answer that will not come
            for request in self._live.values():
                request.settle(error)
            raise

    def _admit(self) -> bool:
        """Fills free slots with what waits, and computes the prompts; False when the sampler is closed."""
        new: dict[int, Request] = {}
        free = [slot for slot in range(self._slots.count) if slot not in self._live]
        while len(new) < len(free):
            try:
                request = (
                    self._waiting.get(timeout=IDLE_S) if not self._live and not new else self._waiting.get_nowait()
                )
            except queue.Empty:
                break
            if request is None:
                return False
            new[free[len(new)]] = request
        if new:
            self._live |= new
            self._prefill(new)
        return True

    def _prefill(self, new: dict[int, Request]) -> None:
        device = self.model.device
        lengths = [len(request.prompt) for request in new.values()]
        rows = [request.prompt + [0] * (max(lengths) - len(request.prompt)) for request in new.values()]
        into, ends = torch.tensor(list(new), device=device), torch.tensor(lengths, device=device)
        hidden = self.model(torch.tensor(rows, device=device), self._slots, into)
        last = hidden[torch.arange(len(rows), device=device), ends - 1]
        drawn, logprobs = draw(self.model.logits(last))
        self._last[into], self._logprobs[into], self._places[into] = drawn, logprobs, ends
        self._note(new)

    def _note(self, requests: dict[int, Request]) -> None:
        """Takes over the newest token of these slots; those that are done leave."""
        drawn, logprobs = self._last.tolist(), self._logprobs.tolist()
        self.tokens += len(requests)
        for slot, request in list(requests.items()):
            request.ids.append(drawn[slot])
            request.logprobs.append(logprobs[slot])
            if drawn[slot] in self._stops or len(request.ids) >= request.max_tokens or request.answer.cancelled():
                del self._live[slot]
                request.settle(Sampled(request.ids, request.logprobs, self.version))


def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row and its logprob. The largest of p / noise, with exponential noise, is a draw from p."""
    scores = logits.log_softmax(-1)
    noise = torch.empty_like(scores).exponential_()
    tokens = (scores - noise.log()).argmax(-1)
    return tokens, scores.gather(1, tokens[:, None])[:, 0].clamp(max=0.0)
