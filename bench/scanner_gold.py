"""False alarms on patches that people made: `python -m bench.scanner_gold FOLDER`.

FOLDER has a folder for each task with `problem_statement.md`, `gold.patch` and `test.patch`, as SWE-bench has them. Each gold
patch is looked over as the change of an agent that has read the new tests. Exit code 1 where a scanner alarms in over 1 %.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.runs.scan.agent_actions import AgentAction, AgentActions
from rollyard.runs.scan.diff import read_diff
from rollyard.runs.scan.scan import load_scanners

FALSE = 0.01


def actions_of(folder: Path) -> AgentActions:
    instruction, patch, tests = (
        (folder / name).read_text() for name in ("problem_statement.md", "gold.patch", "test.patch")
    )
    shown = "\n".join(line[1:] for line in tests.splitlines() if line.startswith("+") and not line.startswith("+++"))
    task = Task(id=folder.name, instruction=instruction)
    return AgentActions(
        rollout=Rollout(id=folder.name, task=task, verdict=Verdict(reward=1.0), diff=patch),
        tools=(AgentAction(call=0, tool="shell", command="cat tests/test_it.py", result=shown, failed=False),),
        said=((1, "Done."),),
        changes=read_diff(patch),
    )


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    scanners, alarms = load_scanners(), Counter[str]()
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/gold.patch"))
    for folder in folders:
        actions = actions_of(folder)
        for name, scanner in scanners.items():
            if (finding := next(iter(scanner(actions)), None)) is not None:
                alarms[name] += 1
                print(f"{name}: {folder.name}: {finding.message}: {' '.join(finding.excerpt.split())[:100]}")
    print(f"\n{len(folders)} patches; false alarms: {', '.join(f'{name} {n}' for name, n in alarms.items()) or 'none'}")
    return 1 if any(count > FALSE * len(folders) for count in alarms.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
