"""The parsers by name, and which one a chat template calls for.

All of them read text; the ids are exact whatever they find. Proven end to end here are `hermes` and `plain` (on real and
trained vocabularies); the others stand on the text samples in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rollyard.core.errors import UnknownName, Unsupported
from rollyard.core.message import Message, Text, ToolCall, ToolSpec
from rollyard.policy.parsers.arguments import spell_arguments, type_arguments
from rollyard.policy.parsers.harmony import HARMONY
from rollyard.policy.parsers.llama import LLAMA
from rollyard.policy.parsers.protocol import ReplyParser
from rollyard.policy.parsers.tagged import HERMES, Tagged, Tags, unwrap_arguments

_SEP = "<\uff5ctool▁sep\uff5c>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


class Plain:
    """A family without tool calls or reasoning: what it says is text."""

    name: str = "plain"
    think: tuple[str, str] = ("", "")

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        return Message("assistant", (Text(text),) if text else ())

    def format(self, message: Message) -> str:
        return message.text


def read_coder(body: str, tools: Sequence[ToolSpec]) -> tuple[str, str] | None:
    """Qwen coder models: `<function=NAME><parameter=KEY>value</parameter>...</function>`."""
    found = _FUNCTION.fullmatch(body)
    if found is None:
        return None
    name = found.group(1).strip()
    return name, type_arguments(name, _PARAMETER.findall(found.group(2)), tools)


def write_coder(call: ToolCall) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in spell_arguments(call))
    return f"\n<function={call.name}>\n{inner}</function>\n"


def read_glm(body: str, tools: Sequence[ToolSpec]) -> tuple[str, str] | None:
    """GLM 4.5 and later: the name, then `<arg_key>` and `<arg_value>` in turn."""
    name = body.partition("<arg_key>")[0].strip()
    if not name or any(c in name for c in '{"\n'):
        return None
    return name, type_arguments(name, ((k.strip(), v) for k, v in _ARGUMENT.findall(body)), tools)


def write_glm(call: ToolCall) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in spell_arguments(call))
    return f"{call.name}\n{pairs}"


def read_deepseek(body: str, tools: Sequence[ToolSpec]) -> tuple[str, str] | None:
    """V3.1: `NAME<sep>{...}`. V3 and R1: `function<sep>NAME` and the arguments in a fence."""
    before, sep, after = body.partition(_SEP)
    if not sep:
        return None
    fenced = _FENCED.search(after)
    if fenced is not None:
        return after[: fenced.start()].strip(), fenced.group(1)
    return before.strip(), after.strip()


def write_deepseek(call: ToolCall) -> str:
    return f"function{_SEP}{call.name}\n```json\n{call.arguments}\n```"


def write_deepseek_v31(call: ToolCall) -> str:
    return f"{call.name}{_SEP}{call.arguments}"


def read_kimi(body: str, tools: Sequence[ToolSpec]) -> tuple[str, str] | None:
    """Kimi K2: `functions.NAME:0<|tool_call_argument_begin|>{...}`."""
    before, sep, after = body.partition("<|tool_call_argument_begin|>")
    if not sep:
        return None
    name = before.strip().removeprefix("functions.").rpartition(":")
    return name[0] or name[2], unwrap_arguments(after.strip())


def write_kimi(call: ToolCall) -> str:
    return f"functions.{call.name}:0<|tool_call_argument_begin|>{call.arguments}"


_DEEPSEEK = Tags(
    open="<\uff5ctool▁call▁begin\uff5c>",
    close="<\uff5ctool▁call▁end\uff5c>",
    section=("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"),
)
_KIMI = Tags(
    open="<|tool_call_begin|>",
    close="<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
_CALL = Tags(open="<tool_call>", close="</tool_call>")

_ALL: tuple[ReplyParser, ...] = (
    HERMES,
    Tagged("qwen-coder", _CALL, read_coder, write_coder),
    Tagged("glm", _CALL, read_glm, write_glm),
    Tagged("deepseek", _DEEPSEEK, read_deepseek, write_deepseek),
    Tagged("deepseek-v3.1", _DEEPSEEK, read_deepseek, write_deepseek_v31),
    Tagged("kimi", _KIMI, read_kimi, write_kimi),
    LLAMA,
    HARMONY,
    Plain(),
)
PARSERS: Mapping[str, ReplyParser] = {parser.name: parser for parser in _ALL}

# marks in a template, most telling first
_MARKS = (
    ("<|channel|>", "harmony"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen-coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ('"parameters": ', "llama"),
)


def parser_named(name: str) -> ReplyParser:
    if name not in PARSERS:
        raise UnknownName("parser", name, list(PARSERS))
    return PARSERS[name]


def parser_for(template: str, *, takes_tools: bool) -> ReplyParser:
    """The parser of the family that a chat template belongs to; an unknown one is refused, not guessed."""
    if "tool▁calls▁begin" in template:
        return PARSERS["deepseek" if "```json" in template else "deepseek-v3.1"]
    for mark, name in _MARKS:
        if mark in template:
            return PARSERS[name]
    if not takes_tools:
        return PARSERS["plain"]
    raise Unsupported(
        "the way this chat template writes tool calls is not known", hint=f"parser= one of {', '.join(PARSERS)}"
    )
