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
one machine with a PostgreSQL server, and two replicas of the control plane. Every row is one run (or one plane) that had to
end by itself.

- *claims*: leases handed out; more than *attempts* means that some attempts were repeated elsewhere.
- *lost*: attempts that do not have exactly the rollout of their last claim. *twice*: attempts with two. Both must be 0.
- *zombie*: calls recorded under a claim that another worker had taken over. *infra reward*: rewards of rollouts that failed at
  another boundary than the agent's. Both must be 0.
- *orphans*: sandboxes, processes, mounts, control groups, leases, open sessions and workers left behind. Must be 0.
- Rows of the plane count instances: *claims* are rows, *zombie* is the quota's difference from the live instances.

These commands write this page and `drills.json` beside it:

```sh
make drills                                      # all, 500 attempts a run; SIZE= and SEED= change that; root, PostgreSQL
python -m bench.drills --only clock --size 60 --seed 2 --out docs/drills.md    # one of them again
python -m bench.drills.campaign --size 3000      # one long run with a fault every minute, and the memory of its processes
```

*attempts* and *seed* are the settings of a row, *cores* and *load* describe the machine; a row stays until its drill is run
again. The seed chooses when and where each fault comes; what the scheduler does in between cannot be repeated.
`bench/drills/cluster.py`, `cut_off.py` and `plane.py` describe the faults.

Campaigns on machines with two cores, shared with other work. In each the driver ended by itself, unless the row says otherwise:

| attempts | a fault every | faults | claims | committed | lost | twice | left | s | load |
|---|---|---|---|---|---|---|---|---|---|
| 100,000 | 60 s | 129 | 100,744 | 100,000 | 0 | 0 | 0 | 7,767 | 15 to 23 |
| 1,000 | 40 s | 10 | 1,036 | 1,000 | 0 | 0 | 0 | 421 | 15 to 20 |
| 1,500 | 12 s | 43 | 1,599 | 1,500 | 0 | 0 | 0 | 718 | 25 to 40 |
| 1,500 | 12 s | 33 | 1,567 | 1,500 | 0 | 0 | 0 | 624 | 25 to 40 |
| 1,500, cut after 700 s | 4 s | 59 | 1,528 | 1,389 | 0 | 0 | 0 | 707 | 30 to 40 |

The campaign of 100,000 (`--size 100000 --nodes 2 --parallel 16`) had each kind of fault 21 or 22 times: workers, sandbox
makers, the database, gates, drivers and nodes were killed. All attempts had a reward; no call of a claim that was taken over
was kept, and no session, lease, sandbox, process, mount or control group was left. The drivers that lived longest held 212 to
229 MB in the second quarter of their lives and 214 or 215 MB in the last, and none held more than 283 MB; workers held 196 and
then 201 MB. The driver was killed 42 times, and each time another one continued after 4 to 22 s (9 s in the median) on a
machine with a load of 20. A run of that size alone on 16 cores (`--nodes 8 --per-node 2 --parallel 128`), which ended with its
machine after 166 s and three faults, committed 17,508 attempts (about 110 a second), lost none and repeated none.

In the smaller ones the driver used 173 to 175 MB and a worker 171 to 173 MB, at the start and at the end.
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
        left = ", ".join(f"{count} {what}" for what, count in result.left.items() if count)
        outcome = "held" if result.ok else f"**broken**: {result.problem or f'left {left}'}"
        lines.append("| " + " | ".join(str(cell) for cell in cells(result)) + f" | {outcome} |")
    total = [sum(result.counts.get(name, 0) for result in done) for name in ("attempts", "lost", "twice")]
    faults = sum(result.faults for result in done)
    lines += ["", f"{faults} faults, {total[0]} attempts, {total[2]} duplicates, {total[1]} lost.", ""]
    return "\n".join(lines)
