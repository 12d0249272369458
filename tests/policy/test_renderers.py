import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollyard as ry
from rollyard.core.call import ids
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.message import Image, Message, Text, Thinking, ToolCall, ToolResult
from rollyard.policy.renderers.chat_template import TemplateRefused
from rollyard.policy.renderers.protocol import SampledTurn, Unbridgeable
from tests.servers.smollm import weights

from .conftest import BASH, make_model, user
from .test_prompts import Rollout, rewritten

OK = "ok"


def said(text="", *commands, thinking=""):
    parts = [Thinking(thinking)] if thinking else []
    parts += [Text(text)] if text else []
    parts += [ToolCall(f"c{n}", "bash", json.dumps({"command": c}, ensure_ascii=False)) for n, c in enumerate(commands)]
    return Message("assistant", tuple(parts))


def answers(message, text=OK):
    return [Message("tool", (ToolResult(c.id, (Text(text),)),)) for c in message.tool_calls]


@pytest.fixture(scope="module")
def tool_renderer(tool_model):
    return ry.policy.renderer(tool_model)


@pytest.fixture(scope="module")
def smollm():
    return ry.policy.renderer(weights())


def test_a_models_folder_says_everything(tool_renderer):
    assert tool_renderer.parser.name == "hermes"
    assert tool_renderer.decode(ids(tool_renderer.stop_ids)) == "<|im_end|>"
    text = tool_renderer.decode(tool_renderer.render((user("hi"),), (BASH,)))
    assert '"name": "bash"' in text and text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_gguf_file_says_everything(smollm):
    assert smollm.parser.name == "plain" and len(smollm.stop_ids) == 1
    assert smollm.decode(smollm.render((user("hi"),))).endswith("user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_the_vocabulary_of_a_gguf_file_is_llama_cpps(smollm, smollm_url):
    """Real text, code, digits, scripts and special tokens: the same ids as the server's own tokenizer."""
    from urllib.request import Request, urlopen

    texts = [
        "def f(x):\n\treturn x  # 12345",
        "don't  stop\r\n",
        "日本語 é 🙂 \u00a0",
        "<|im_start|>user\nhi<|im_end|>",
        "",
    ]
    for text in texts:
        body = json.dumps({"content": text, "parse_special": True}).encode()
        with urlopen(
            Request(f"{smollm_url}/tokenize", body, {"content-type": "application/json"}), timeout=30
        ) as answer:
            assert json.load(answer)["tokens"] == smollm.encode(text).tolist()


def test_a_bridge_equals_a_full_render_when_the_text_is_canonical(tool_renderer):
    messages = [Message("system", (Text("be good"),)), user("go")]
    for answer in (said("looking", "ls", "pwd"), said("", "cat x"), said("done")):
        prompt = tool_renderer.render(messages, (BASH,))
        new = answers(answer) or [user("more")]
        completion = tool_renderer.completion_of(answer)
        bridged = tool_renderer.bridge(SampledTurn(prompt, len(prompt), completion, answer), new, (BASH,))
        messages += [answer, *new]
        assert prompt + completion + bridged.ids == tool_renderer.render(messages, (BASH,))
        assert bridged.inserted == ()


def test_sampled_ids_that_are_not_the_canonical_ones_are_kept(tool_renderer):
    """The model said `hello` in single letters; a re-render would merge them."""
    letters = ids([tool_renderer.encode(c)[0] for c in "hello"])
    sampled = letters + ids(tool_renderer.stop_ids)
    assert len(tool_renderer.encode("hello")) < len(letters)
    prompt = tool_renderer.render((user("say hello"),))
    answer = tool_renderer.parse(sampled)
    bridged = tool_renderer.bridge(SampledTurn(prompt, len(prompt), sampled, answer), (user("again"),))
    whole = prompt + sampled + bridged.ids
    rendered = tool_renderer.render((user("say hello"), answer, user("again")))
    assert answer.text == "hello" and whole != rendered
    assert tool_renderer.decode(whole) == tool_renderer.decode(rendered)


def test_a_turn_cut_inside_its_reasoning_is_closed_twice_and_only_by_inserted_tokens(tool_renderer):
    sampled = tool_renderer.encode("<think>\nso I wonder")
    answer = tool_renderer.parse(sampled)
    bridged = tool_renderer.bridge(SampledTurn(ids(), 0, sampled, answer), (user("well?"),))
    ((start, end),) = bridged.inserted
    assert start == 0 and tool_renderer.decode(bridged.ids[:end]) == "</think><|im_end|>"


def test_a_template_that_strips_reasoning_is_bridged_when_it_is_to_be_kept_and_refused_when_not(tmp_path):
    folder = make_model(tmp_path / "m", "stripping")
    keep = ry.policy.renderer(folder, parser="hermes")
    strip = ry.policy.renderer(folder, parser="hermes", history="template")
    answer = said("yes", thinking="let me think")
    completion = keep.completion_of(answer)
    turn = SampledTurn(ids(), 0, completion, answer)
    bridged = keep.bridge(turn, (user("more"),))
    assert keep.decode(bridged.ids) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(Unbridgeable) as refused:
        strip.bridge(turn, (user("more"),))
    assert refused.value.reason == "thinking_stripped"


def test_a_template_that_cannot_be_appended_to_is_refused_at_once(tmp_path):
    with pytest.raises(Unsupported, match="does not keep its prefix"):
        ry.policy.renderer(make_model(tmp_path / "m", "counting"))


def test_tools_for_a_template_without_tools_are_refused_or_left_out_never_dropped_silently(smollm):
    with pytest.raises(Unsupported, match="omit"):
        smollm.render((user("go"),), (BASH,))
    omitting = ry.policy.renderer(weights(), tools="omit")
    assert omitting.render((user("go"),), (BASH,)) == smollm.render((user("go"),))


def test_an_image_for_a_text_model_is_refused(tool_renderer):
    with pytest.raises(TemplateRefused, match="image"):
        tool_renderer.render((Message("user", (Image("image/png", "aGk="),)),))


def test_a_template_runs_in_a_sandbox(tmp_path):
    folder = make_model(tmp_path / "m", "tools")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}<|im_end|>")
    with pytest.raises((TemplateRefused, Unsupported)):
        ry.policy.renderer(folder)


@pytest.mark.parametrize("source", ["/nowhere/at/all", "no-such-thing", __file__])
def test_a_source_that_is_nothing_is_refused(source):
    with pytest.raises(ConfigError):
        ry.policy.renderer(source)


def test_a_stop_token_that_the_vocabulary_lacks_is_refused(tool_model):
    with pytest.raises(ConfigError, match="<eot>"):
        ry.policy.renderer(tool_model, stop=["<eot>"])


QWEN = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def tokenizer_of(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_a_family_of_the_renderers_package_bridges_and_parses(tmp_path):
    pytest.importorskip("renderers", reason="the renderers package is not installed")
    renderer = ry.policy.renderer(make_model(tmp_path / "m", "tools", QWEN), family="qwen3")
    rollout = Rollout(renderer)
    encode = tokenizer_of(tmp_path / "m").encode
    sampled = ids(
        encode('I look.\n<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call><|im_end|>').ids
    )
    call, reply = rollout.turn([user("go")], sampled)
    assert reply.message.text.strip() == "I look." and reply.message.tool_calls[0].name == "bash"
    after, _ = rollout.turn([user("go"), rewritten(reply.message), *answers(reply.message)], sampled)
    before = call.prompt_ids + sampled
    assert after.prompt_source == "bridge" and after.prompt_ids[: len(before)] == before
    assert "<tool_response>\nok\n</tool_response>" in renderer.decode(after.prompt_ids[len(before) :])


def test_a_family_closes_a_cut_turn_with_inserted_tokens(tmp_path):
    pytest.importorskip("renderers", reason="the renderers package is not installed")
    renderer = ry.policy.renderer(make_model(tmp_path / "m", "tools", QWEN), family="qwen3")
    cut = ids(tokenizer_of(tmp_path / "m").encode("half a").ids)
    answer = renderer.parse(cut)
    prompt = renderer.render((user("go"),))
    bridged = renderer.bridge(SampledTurn(prompt, len(prompt), cut, answer), answers(said("", "x")))
    ((start, end),) = bridged.inserted
    assert (start, end) == (0, 1) and bridged.ids[0] in renderer.stop_ids


texts = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), max_size=16)
# the template ends a prompt in a line break, with which white space at the start of an answer would become one token
canonical = texts.filter(lambda text: not text[:1].isspace())
turns = st.lists(
    st.tuples(
        texts, st.lists(texts.filter(bool), max_size=3), texts, st.booleans(), st.lists(st.integers(0, 699), max_size=6)
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns)
def test_no_sampled_token_is_ever_changed_on_a_trained_vocabulary(tool_renderer, conversation):
    """The concatenation law on a real BPE and template: random text, calls, raw random ids, cuts, rewritten echoes."""
    rollout = Rollout(tool_renderer)
    messages, before = [user("go")], None
    for n, (text, commands, reply_text, cut, raw) in enumerate(conversation):
        whole = tool_renderer.completion_of(said(text, *(f"{n}{c}" for c in commands)))
        sampled = ids(raw) + whole[: -1 if cut else None]
        if not sampled:
            sampled = ids(tool_renderer.stop_ids)
        call, reply = rollout.turn(messages, sampled)
        if before is not None:
            assert call.prompt_source == "bridge" and call.prompt_ids[: len(before)] == before
        before = call.prompt_ids + sampled
        results = answers(reply.message, reply_text)
        messages += [rewritten(reply.message), *results] if results else [reply.message, user(reply_text)]
    branch = rollout.trajectory.branches[-1]
    assert branch.ids == before


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(canonical, texts), min_size=1, max_size=4))
def test_bridge_equals_render_for_canonical_text_on_smollm(smollm, conversation):
    rollout = Rollout(smollm, check="always")
    messages = [user("go")]
    for text, more in conversation:
        answer = said(text)
        rollout.turn(messages, answer, tools=())
        messages += [answer, user(more)]
    assert rollout.prompts.counts["check:differs"] == 0
