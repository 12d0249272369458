"""ROCK's API: the published `rl-rock` package starts sandboxes, runs commands and shells in them, and plays environments.

Its client takes a base URL and, for environments, sends no header at all: so the key is a part of the URL
(`ROCK_BASE_URL=http://host:port/rock/KEY`). `sandboxes.py` serves the sandbox calls, `shells.py` keeps the shells, `gem.py` the
environments.
"""
