"""`make attack`: every test marked `adversarial`, and a table of who tried what how often and with what success.

A party is a heading of docs/threat-model.md: a test belongs to the party under which it, or else its file, is named there. An
attempt is one test case; one that fails is an attack that succeeded. What this machine cannot try is counted apart.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Where a file's attacks come from, unless the threat model names one of them under another party.
FILES = {
    "tests/wire": "Agent",
    "tests/gate": "Agent",
    "tests/policy": "Hostile model server",
    "tests/tools": "Agent",
    "tests/envs": "Agent",
    "tests/sandbox": "Agent",
    "tests/tasks": "Agent",
    "tests/runs": "Agent",
    "tests/core": "Task author",
    "tests/fuzz": "Any sender of bytes",
    "tests/plane": "Other owner",
    "tests/net": "Web page in the operator's browser",
    "tests/store": "User of the host",
    "tests/train": "Other owner",
}


def read_parties(text: str) -> dict[str, str]:
    """Test name -> the heading it is named under."""
    found: dict[str, str] = {}
    for section in re.split(r"^## Party: ", text, flags=re.M)[1:]:
        heading, _, body = section.partition("\n")
        for name in re.findall(r"\b(test_\w+)`", body.partition("\n## ")[0]):
            found.setdefault(name, heading.strip())
    return found


def count(report: Path, parties: dict[str, str]) -> dict[str, Counter[str]]:
    table: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        name, place = case.get("name", "").partition("[")[0], case.get("classname", "").replace(".", "/")
        party = parties.get(name) or next((who for start, who in FILES.items() if place.startswith(start)), "Agent")
        kinds = {child.tag for child in case}
        outcome = "successes" if kinds & {"failure", "error"} else "not tried" if "skipped" in kinds else "held"
        table.setdefault(party, Counter())[outcome] += 1
    return table


def write(table: dict[str, Counter[str]]) -> str:
    lines = ["| party | attempts | successes | not tried here |", "|---|---|---|---|"]
    total: Counter[str] = Counter()
    for party, counts in [*sorted(table.items()), ("all", total)]:
        lines.append(
            f"| {party} | {counts['held'] + counts['successes']} | {counts['successes']} | {counts['not tried']} |"
        )
        total.update(counts)
    return "\n".join(lines)


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "attack.xml"
        command = [sys.executable, "-m", "pytest", "-m", "adversarial", f"--junitxml={report}", *words]
        subprocess.run(command, cwd=ROOT, check=False)
        if not report.exists():
            print("the tests did not run", file=sys.stderr)
            return 3
        table = count(report, read_parties((ROOT / "docs" / "threat-model.md").read_text()))
    print(write(table))
    return 1 if any(counts["successes"] for counts in table.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
