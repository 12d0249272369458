"""The drills' summary, as lines on the terminal and as a page of the documentation."""

from __future__ import annotations

from typing import Any

from bench.drills.cluster import Result

HEAD = (
    "drill",
    "seed",
    "faults",
    "attempts",
    "claims",
    "committed",
    "scored",
    "lost",
    "twice",
    "zombie",
    "infra reward",
    "orphans",
    "s",
    "cores",
    "load",
)
ABOUT = """# Drills

`make drills` breaks one part of a working system at a time and then checks the records: a real Ray cluster of three nodes on
one machine with a PostgreSQL server, and two replicas of the control plane. Every line is one run (or one plane) that had to
end by itself.

- *claims*: leases handed out; more than *attempts* means that attempts were done again elsewhere.
- *lost*: attempts without exactly the rollout of their last claim. *twice*: attempts with two. Both must be 0.
- *zombie*: calls recorded under a claim that another worker had taken over. *infra reward*: rewards of rollouts that failed at
  another boundary than the agent's. Both must be 0.
- *orphans*: sandboxes, processes, mounts, control groups, leases, open sessions and workers left behind. Must be 0.

- The plane's lines count instances: *claims* are rows, *zombie* is the quota's difference from the live instances.

This page and `drills.json` beside it are written by

```sh
make drills                                      # all, 500 attempts a run; SIZE= and SEED= change that; root, PostgreSQL
python -m bench.drills --only clock --size 60 --seed 2 --out docs/drills.md    # one of them again
python -m bench.drills.campaign --size 3000      # one long run with a fault every minute, and the memory of its processes
```

A line's *attempts* and *seed* say what it was run with, *cores* and *load* on what machine; it stays until its drill is run
again. The seed chooses when and where each fault comes; what the scheduler does in between is not repeatable. The faults are
described in `bench/drills/cluster.py`, `cut_off.py` and `plane.py`.

The campaign of 1,000 attempts with a fault every 40 s (worker, zygote, database, gate, driver, node; 10 faults in 421 s, load
15 to 20): 1,036 claims, 1,000 committed and scored, 0 lost, 0 twice, 0 left behind; the driver held 172 MB at its beginning and
at its end, workers grew by at most 3 MB.
"""


def cells(result: Result) -> list[Any]:
    counts = result.counts
    orphans = sum(result.left.values()) + counts.get("leases", 0) + counts.get("open_sessions", 0)
    names = ("attempts", "claims", "committed", "scored", "lost", "twice", "zombie_calls", "reward_of_infra")
    return [
        result.name,
        result.seed,
        result.faults,
        *(counts.get(name, "-") for name in names),
        orphans,
        f"{result.seconds:.0f}",
        result.cores or "-",
        f"{result.load:.0f}" if result.load else "-",
    ]


def row(result: Result) -> str:
    line = "  ".join(f"{name} {value}" for name, value in zip(HEAD[1:], cells(result)[1:], strict=True))
    wrong = "" if result.ok else f"  BROKEN {result.problem} {result.left}"
    unscored = f"  without a reward: {result.causes}" if result.causes else ""
    return f"{result.name:18} {line}{unscored}{wrong}"


def page(done: list[Result]) -> str:
    lines = [ABOUT, "| " + " | ".join(HEAD) + " | outcome |", "|" + "---|" * (len(HEAD) + 1)]
    for result in done:
        outcome = "held" if result.ok else f"**broken**: {result.problem}"
        lines.append("| " + " | ".join(str(cell) for cell in cells(result)) + f" | {outcome} |")
    total = [sum(result.counts.get(name, 0) for result in done) for name in ("attempts", "lost", "twice")]
    faults = sum(result.faults for result in done)
    lines += ["", f"{faults} faults, {total[0]} attempts, {total[2]} duplicates, {total[1]} lost.", ""]
    return "\n".join(lines)
