"""Verifiers: each turns what an agent left into a `Verdict`. A file here is one kind; `make` finds it by name."""
