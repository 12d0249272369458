"""What a local sandbox can do, by its isolation level."""

from __future__ import annotations

from rollyard.core.sandbox import Capabilities
from rollyard.sandbox.local.cgroups import Cgroups
from rollyard.sandbox.local.ids import IdMap
from rollyard.sandbox.local.probe import ISOLATION, NAMESPACED, Level, Trial
from rollyard.sandbox.retry import OpenLimits


def capabilities(level: Level, trial: Trial, ids: IdMap, cgroups: Cgroups, limits: OpenLimits) -> Capabilities:
    """With namespaces a sandbox has a root, a network and a process tree of its own, else it shares the host's, and has a root of
    its own only where its programs can be traced. Without /proc a program's descendants can only be found by their session, so a
    whole tree cannot be promised dead."""
    own = level in NAMESPACED
    rooted = own or trial.view
    bound = rooted and level != "none"  # nothing there keeps programs from writing to what is only shown
    return Capabilities(
        isolation=ISOLATION[level],
        images=rooted,
        layers=bound,
        mounts=bound,
        snapshot=rooted,
        pause=own,
        stdin=True,
        users=own and ids.many,
        root=own,
        listen=True,
        dial=own,
        network_none=own or closes_network(level, trial),
        network_allowlist=own,
        services=own and level != "no_proc",  # a sandbox finds its own namespaces there
        attach=True,
        list=True,
        ttl=True,
        idle_ttl=True,
        extend=True,
        lifetime_ttl=True,
        bytes_exact=True,
        tree_kill=level != "no_proc",
        memory_limit=cgroups.has("memory"),
        pids_limit=own or cgroups.has("pids"),
        cpu_limit=cgroups.has("cpu"),
        disk_limit=own,
        pool=True,
        max_concurrent=limits.live,
        creates_per_s=limits.creates_per_s,
    )


def closes_network(level: Level, trial: Trial) -> bool:
    """Whether programs on the host's network can connect to the ports of their listeners alone: Landlock knows TCP from ABI 4,
    the system-call filter leaves no other sockets of the internet, and the tracer none beyond loopback."""
    return level == "landlock" and trial.landlock >= 4 and trial.view
