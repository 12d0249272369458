"""Parsers: the text a model family samples, to messages with tool calls and reasoning, and back."""
