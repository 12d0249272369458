"""What a model server gives, in words: found by asking it, with what to start it with where it could give more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from rollyard.core.call import Call, CaptureLevel, Reply, Sampling
from rollyard.core.errors import Error
from rollyard.core.ids import new_id
from rollyard.core.message import Message, Text, ToolSpec

PROBE_TOKENS = 16  # enough to see whether an answer begins with reasoning
PROBE_TOOL = ToolSpec("now", "Gives the time.", '{"type":"object","properties":{}}')
EVIDENCE: Mapping[CaptureLevel, str] = {
    "tokens": "the prompt's ids, the sampled ids and a logprob for each: these turns can be trained on",
    "logprobs": "logprobs, but not all ids: nothing to train on",
    "text": "text alone: good for evaluation, nothing to train on",
    "none": "nothing",
}
# what to start each engine with, by the `owned_by` of its model list
TOKENS_ADVICE = {
    "vllm": "vLLM 0.10.2 and newer give ids; is there a proxy before it that drops fields?",
    "sglang": "its chat endpoint does not say which prompt it used: use tokens:URL",
    "llamacpp": "its chat endpoint does not say which prompt it used: use tokens:URL",
}
TOOLS_ADVICE = {
    "vllm": "start it with --enable-auto-tool-choice --tool-call-parser NAME (hermes for Qwen and most others)",
    "sglang": "start it with --tool-call-parser NAME",
    "llamacpp": "start it with --jinja",
}
THINKING_ADVICE = {"vllm": "start it with --reasoning-parser NAME", "sglang": "start it with --reasoning-parser NAME"}
OTHER_TOKENS = "engines that give ids: vLLM, SGLang, llama.cpp, `rollyard serve model`"


class ProbeRow(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    found: str
    advice: str = ""


class ServerProbe(msgspec.Struct, frozen=True, kw_only=True):
    """`level` is what can be captured; `str()` of it is a line for each thing, with advice behind an arrow."""

    url: str
    level: CaptureLevel
    rows: tuple[ProbeRow, ...]

    def __str__(self) -> str:
        return "\n".join([self.url, *_lines(self.rows)])


def _lines(rows: tuple[ProbeRow, ...]) -> Iterator[str]:
    width = max(len(row.name) for row in rows)
    for row in rows:
        yield f"  {row.name:<{width}}  {row.found}" + (f"\n  {'':<{width}}  -> {row.advice}" if row.advice else "")


def hello(model: str, *, tokens: int = 1, tools: tuple[ToolSpec, ...] = ()) -> Call:
    """The smallest call there is."""
    return Call(
        id=new_id("call"),
        rollout_id="probe",
        dialect="chat",
        model=model,
        messages=(Message("user", (Text("Say hi."),)),),
        tools=tools,
        sampling=Sampling(max_tokens=tokens),
        kind="auxiliary",
    )


def model_row(model: str, served: str) -> ProbeRow:
    return ProbeRow("model", model if not served or served == model else f"{model} of {served}")


def context_row(context: int | None) -> ProbeRow:
    if context is None:
        return ProbeRow(
            "context", "the model list does not say", "max_tokens_cap= bounds answers where agents name no number"
        )
    return ProbeRow("context", f"{context} tokens for prompt and answer together")


def tokens_row(level: CaptureLevel, owner: str) -> ProbeRow:
    return ProbeRow("tokens", EVIDENCE[level], "" if level == "tokens" else TOKENS_ADVICE.get(owner, OTHER_TOKENS))


def tools_row(refusal: Error | None, owner: str) -> ProbeRow:
    if refusal is None:
        return ProbeRow("tools", "taken, and calls are parsed by the server")
    return ProbeRow("tools", f"refused: {refusal.message}", TOOLS_ADVICE.get(owner, "use a server that takes tools"))


def thinking_row(reply: Reply, owner: str) -> ProbeRow:
    if reply.message.thinking:
        return ProbeRow("thinking", "comes apart from the text")
    if "<think>" in reply.message.text:
        return ProbeRow("thinking", "stands in the text", THINKING_ADVICE.get(owner, "disable_thinking= turns it off"))
    return ProbeRow("thinking", f"none within {PROBE_TOKENS} tokens")
