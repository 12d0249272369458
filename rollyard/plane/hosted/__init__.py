"""Engines at the other end of an HTTP API: `standard` (AEnvironment's contract for sandbox backends) and `arca`."""
