"""The conformance table of the docs: what each backend passed, and what it skipped and why.

Each backend has a file of results, written from a run of the suite; the table is made from those files. So a backend is in
the table exactly when it was run, and a case that is new is missing in the table until it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from rollyard.testing.sandbox import cases
from rollyard.testing.suite import CaseOutcome

START, END = "<!-- conformance: start -->", "<!-- conformance: end -->"
_MARKS = {"passed": "yes", "skipped": "-", "failed": "**no**"}


class Results(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`results` maps a case's id to passed, skipped or failed; `why` says it for the skipped ones."""

    backend: str
    isolation: str
    results: Mapping[str, str]
    why: Mapping[str, str] = {}


def results(backend: str, isolation: str, outcomes: Iterable[CaseOutcome]) -> Results:
    found = list(outcomes)
    return Results(
        backend=backend,
        isolation=isolation,
        results={one.id: one.result for one in found},
        why={one.id: one.why for one in found if one.result == "skipped"},
    )


def add(place: Path, found: Results) -> None:
    """Put these results into the backend's file, over what it says of the same cases."""
    path = place / f"{found.backend}.json"
    before = read(place, found.backend) if path.is_file() else found
    merged = {**before.results, **found.results}
    why = {name: text for name, text in {**before.why, **found.why}.items() if merged[name] == "skipped"}
    order = [case.id for case in cases()]
    kept = Results(
        backend=found.backend,
        isolation=found.isolation,
        results={name: merged[name] for name in order if name in merged},
        why={name: why[name] for name in order if name in why},
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")


def read(place: Path, backend: str) -> Results:
    return msgspec.json.decode((place / f"{backend}.json").read_bytes(), type=Results)


def read_all(place: Path) -> list[Results]:
    return [read(place, path.stem) for path in sorted(place.glob("*.json"))]


def render(found: list[Results]) -> str:
    """One row for each case, one column for each backend, then the reasons."""
    head = " | ".join(one.backend for one in found)
    isolation = " | ".join(f"*{one.isolation}*" for one in found)
    rows = [f"| case | {head} |", f"|---|{'---|' * len(found)}", f"| isolation | {isolation} |"]
    for case in cases():
        marks = " | ".join(_MARKS.get(one.results.get(case.id, ""), "not run") for one in found)
        rows.append(f"| {case.id} {case.title} | {marks} |")
    reasons = [f"- {one.backend} {name}: {why}" for one in found for name, why in one.why.items()]
    return "\n".join([*rows, "", "Skipped:", "", *reasons])


def put(page: str, table: str) -> str:
    """The page with its table replaced."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n\n{table}\n\n{END}{rest.partition(END)[2]}"
