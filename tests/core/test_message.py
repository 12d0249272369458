"""The digest of a message survives what real agents do to an echo."""

from rollyard.core.message import Message, Text, Thinking, ToolCall


def assistant(text="", arguments='{"a": 1, "b": [2]}', thinking=None):
    parts = [Thinking(thinking)] if thinking else []
    return Message("assistant", (*parts, Text(text), ToolCall("c1", "sh", arguments)))


def test_respaced_arguments_trailing_space_and_dropped_reasoning_keep_the_digest():
    assert assistant("hi", thinking="hm").digest == assistant("hi  \n", '{"b":[2],"a":1}').digest


def test_other_words_or_arguments_change_the_digest():
    assert len({assistant("hi").digest, assistant("ho").digest, assistant("hi", '{"a": 2}').digest}) == 3


def test_arguments_that_are_not_json_are_compared_as_text():
    assert assistant("x", "{broken").digest == assistant("x", "{broken ").digest != assistant("x", "{broke").digest


def test_no_arguments_and_an_empty_object_are_the_same_call():
    assert assistant("x", "").digest == assistant("x", " { } ").digest != assistant("x", "[]").digest
