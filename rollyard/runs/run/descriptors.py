"""File descriptors of a process that runs rollouts: many systems give a program 1,024 unless it asks for what it may have."""

from __future__ import annotations

import resource

MOST = 65_536  # more is of no use, and what a sandbox inherits makes old programs slow that close every possible descriptor


def raise_descriptor_limit() -> None:
    """As many as the system allows this process; some eight are open for each rollout in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
