import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollyard.core.errors import UnknownName, Unsupported
from rollyard.core.message import Message, Text, Thinking, ToolCall, ToolSpec
from rollyard.policy.parsers.families import PARSERS, parser_for, parser_named
from rollyard.policy.parsers.protocol import stamp_call_ids

UNHURRIED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BAR = "\uff5c"
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "count": {"type": "integer"}, "flags": {"type": "array"}, "raw": {}},
}
TOOLS = (ToolSpec("bash", "", json.dumps(SCHEMA)), ToolSpec("read_file", "", json.dumps(SCHEMA)))

# what each family samples (as text, special tokens shown) -> reasoning, text, calls
SAMPLES = {
    "hermes": (
        '<think>\nlook first\n</think>\n\nI will look.\n<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "read_file", "arguments": {"command": "a", "count": 2}}\n</tool_call>',
        "look first",
        "I will look.",
        [("bash", '{"command":  "ls"}'), ("read_file", '{"command": "a", "count": 2}')],
    ),
    "qwen-coder": (
        "I will look.\n<tool_call>\n<function=bash>\n<parameter=command>\nls -l\n</parameter>\n<parameter=count>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        "I will look.",
        [("bash", '{"command":"ls -l","count":3}')],
    ),
    "glm": (
        "<think>look first</think>\nI will look.\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>true</arg_value>\n"
        "<arg_key>flags</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>",
        "look first",
        "I will look.",
        [("bash", '{"command":"true","flags":[1,2]}')],
    ),
    "deepseek": (
        f"<think>\nlook first\n</think>\n\nI will look.<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>function"
        f'<{BAR}tool▁sep{BAR}>bash\n```json\n{{"command": "ls"}}\n```<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>',
        "look first",
        "I will look.",
        [("bash", '{"command": "ls"}')],
    ),
    "deepseek-v3.1": (
        f"I will look.<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>bash<{BAR}tool▁sep{BAR}>"
        f'{{"command": "ls"}}<{BAR}tool▁call▁end{BAR}><{BAR}tool▁call▁begin{BAR}>read_file<{BAR}tool▁sep{BAR}>'
        f'{{"command": "a"}}<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>',
        "",
        "I will look.",
        [("bash", '{"command": "ls"}'), ("read_file", '{"command": "a"}')],
    ),
    "kimi": (
        "I will look.<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
        '{"command": "ls"}<|tool_call_end|><|tool_call_begin|>functions.read_file:1<|tool_call_argument_begin|>{"command": "a"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        "I will look.",
        [("bash", '{"command": "ls"}'), ("read_file", '{"command": "a"}')],
    ),
    "llama": (
        '{"name": "bash", "parameters": {"command": "ls"}}; {"name": "read_file", "parameters": {"command": "a"}}',
        "",
        "",
        [("bash", '{"command": "ls"}'), ("read_file", '{"command": "a"}')],
    ),
    "harmony": (
        "<|channel|>analysis<|message|>look first<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}<|call|>',
        "look first",
        "I will look.",
        [("bash", '{"command": "ls"}')],
    ),
    "plain": ("I will look.", "", "I will look.", []),
}


@pytest.mark.parametrize("family", sorted(PARSERS))
def test_what_a_family_samples_becomes_reasoning_text_and_calls(family):
    sampled, thinking, text, calls = SAMPLES[family]
    message = parser_named(family).parse(sampled, TOOLS)
    assert message.thinking == thinking and message.text == text
    assert [(c.name, c.arguments) for c in message.tool_calls] == calls


def test_harmonys_final_channel_and_its_other_spelling_of_a_recipient():
    harmony = parser_named("harmony")
    assert harmony.parse("<|channel|>final<|message|>Four.<|return|>").text == "Four."
    early = harmony.parse(
        '<|start|>assistant to=functions.bash<|channel|>commentary json<|message|>{"command":"ls"}<|call|>'
    )
    assert early.tool_calls[0].name == "bash"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>'),
        ("hermes", "<tool_call>nonsense</tool_call>"),
        ("hermes", "plain text with a <tool_call"),
        ("qwen-coder", "<tool_call>\n<parameter=x>1</parameter>\n</tool_call>"),
        ("deepseek", f"<{BAR}tool▁call▁begin{BAR}>bash<{BAR}tool▁call▁end{BAR}>"),
        ("kimi", "<|tool_call_begin|>functions.bash:0<|tool_call_end|>"),
        ("llama", '{"name": "bash", "parameters": {"command": "ls"} and then words'),
        ("llama", '{"answer": 4}'),
        ("harmony", "just words"),
    ],
)
def test_what_is_not_a_call_stays_text(family, text):
    message = parser_named(family).parse(text, TOOLS)
    assert message.tool_calls == () and message.text == text


def test_reasoning_that_was_opened_by_the_prompt_or_never_closed_is_still_reasoning():
    hermes = parser_named("hermes")
    opened = hermes.parse("I was thinking\n</think>\n\nyes")
    assert opened.thinking == "I was thinking" and opened.text == "yes"
    cut = hermes.parse("<think>\nand then")
    assert cut.thinking == "and then" and cut.text == ""


def test_a_call_cut_by_the_length_limit_is_a_call_only_when_it_is_whole():
    hermes = parser_named("hermes")
    assert hermes.parse('<tool_call>\n{"name": "bash", "arguments": {}}').tool_calls[0].name == "bash"
    assert not hermes.parse('<tool_call>\n{"name": "bash", "arguments": {').tool_calls


words = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="<>{}|`" + BAR), max_size=20
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | words, lambda v: st.lists(v, max_size=2), max_leaves=3
)


@pytest.mark.parametrize("family", [f for f in sorted(PARSERS) if f != "plain"])
@UNHURRIED
@given(
    text=words.map(str.strip),
    calls=st.lists(st.tuples(st.sampled_from(["bash", "read_file"]), words, values), min_size=1, max_size=3),
)
def test_what_is_formatted_is_parsed_back(family, text, calls):
    parser = parser_named(family)
    text = "" if family == "llama" else text
    parts = [Text(text)] if text else []
    parts += [
        ToolCall(f"call_{n}", name, json.dumps({"command": c.strip(), "raw": v}))
        for n, (name, c, v) in enumerate(calls)
    ]
    back = parser.parse(parser.format(Message("assistant", tuple(parts))), TOOLS)
    assert back.text == text
    wanted = [(p.name, json.loads(p.arguments)) for p in parts if isinstance(p, ToolCall)]
    if family in ("glm", "qwen-coder"):  # an untyped value that looks like JSON is JSON there
        wanted = [(n, {**a, "raw": as_text(a["raw"])}) for n, a in wanted]
    assert [(c.name, json.loads(c.arguments)) for c in back.tool_calls] == wanted


def as_text(value):
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


@UNHURRIED
@given(st.text(max_size=60), st.sampled_from(sorted(PARSERS)))
def test_no_text_breaks_a_parser(text, family):
    parser_named(family).parse(text, TOOLS)
    parser_named(family).parse(SAMPLES[family][0][: len(text)] + text, TOOLS)


def test_tool_call_ids_are_unique_to_their_turn_and_the_same_each_time():
    message = Message("assistant", (Thinking("t"), ToolCall("call_0", "bash", "{}"), ToolCall("call_1", "bash", "{}")))
    one, again, other = (
        stamp_call_ids(message, "call_a"),
        stamp_call_ids(message, "call_a"),
        stamp_call_ids(message, "call_b"),
    )
    ids = [c.id for m in (one, other) for c in m.tool_calls]
    assert len(set(ids)) == 4 and one == again


def test_a_template_names_its_parser_and_an_unknown_one_is_refused():
    assert parser_for("...<tool_call>...<arg_key>", takes_tools=True).name == "glm"
    assert parser_for("<|im_start|>", takes_tools=False).name == "plain"
    with pytest.raises(Unsupported, match="parser="):
        parser_for("{% if tools %}[TOOLZ]{% endif %}", takes_tools=True)
    with pytest.raises(UnknownName, match="hermes"):
        parser_named("hermess")
