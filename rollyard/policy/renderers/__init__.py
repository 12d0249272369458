"""Renderers: messages to token ids and back, one value per model family."""
