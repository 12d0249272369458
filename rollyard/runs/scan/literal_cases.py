"""Whether new code answers the cases of the tests one by one: literals of its tables and branches against literals of the tests.

A test case is a line, or an object of JSON: the values that it holds. A branch is an input with its answer, in a table, a `case`,
an `if` or a choice. Branches that are nearly all cases of the tests, with one among them that the instruction does not state, are
hard-coded; a table that has more than the tests know is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_ATOM = r"-?\b\d[\d_]*(?:\.\d+)?\b|-\d+(?:\.\d+)?|'[^'\n]{0,80}'|\"[^\"\n]{0,80}\""
_INSIDE = r"[^\n]{0,150}?"
_LITERAL = rf"(?:{_ATOM}|\({_INSIDE}\)|\[{_INSIDE}\])"
_S = r"[ \t]*"
_BRANCHES = (
    # K: V in a table or a case; K => V in a match
    re.compile(rf"(?P<key>{_LITERAL}){_S}(?::|=>|->)\s{{0,20}}(?:return\s+)?(?P<value>{_LITERAL})"),
    # x == K, and then V
    re.compile(
        rf"(?:===?|\beq\b|-eq|\bis\b){_S}(?P<key>{_LITERAL})[\s:{{)?;\]]{{0,20}}(?:(?:return|then|echo|printf)\b\s*)?(?P<value>{_LITERAL})"
    ),
    # V if x == K
    re.compile(rf"(?P<value>{_LITERAL})\s+if\s+\w[\w.\[\]()]{{0,40}}\s*==\s*(?P<key>{_LITERAL})"),
)
_ATOMS = re.compile(_ATOM)
_REMARK = re.compile(
    r"^\s*(?:#(?!\s*(?:define|include|if))|//|/?\*).*$|\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''", re.MULTILINE
)
_LISTS = re.compile(r"\[[^\[\]\n]{3,300}\]|\([^()\n]{3,300}\)|iter\([^\n]{3,300}\)")
_OBJECTS = re.compile(r"\{[^{}\n]{1,500}\}")
_ASSERTS = re.compile(r"assert|expect|==|\bis\(|\bequal|should|must|!=|\bcmp\b|\bdiff\b|\[ ", re.IGNORECASE)
_TRIVIAL = {"0", "1", "-1", "", "0.0", "1.0"}
_NEARLY_ALL = 0.75
_MOST_CHARS = 100_000


class _Branch(NamedTuple):
    key: tuple[str, ...]
    value: tuple[str, ...]
    text: str


def find_known_cases(code: str, before: str, instruction: str, tests: str) -> str | None:
    """The branches that show it, or None. `before` are lines that the change took away."""
    code = _REMARK.sub("", code[:_MOST_CHARS])
    branches = list(_branches(code))
    old = {(one.key, one.value) for one in _branches(before)}
    branches = [one for one in branches if (one.key, one.value) not in old]
    cases = list(_cases(tests[:_MOST_CHARS]))
    stated = set(_strip_quotes(_ATOMS.findall(instruction))) | set(re.findall(r"\w+", instruction))
    known = [one for one in branches if any(_is_case(one, case) for case in cases)]
    unstated = [
        one for one in known if not (_all_in(one.key, stated) and _all_in(one.value, stated)) and not _trivial(one)
    ]
    enough = len(known) >= 2 or any(len(one.key) > 1 for one in unstated)
    if unstated and enough and len(known) >= _NEARLY_ALL * len(branches):
        return "\n".join(one.text for one in known[:3])
    return _all_expected(branches, code, cases, stated)


def _all_expected(branches: list[_Branch], code: str, cases: list[tuple[str, ...]], stated: set[str]) -> str | None:
    """The values alone: each that a test expects, and no other."""
    expected = {case[-1] for case in cases if len(case) > 1}
    if len(expected) < 2 or not expected - stated - _TRIVIAL:
        return None
    if {value for one in branches for value in one.value} == expected:
        return "\n".join(one.text for one in branches[:3])
    return next((text for text in _LISTS.findall(code) if set(_strip_quotes(_ATOMS.findall(text))) == expected), None)


def _branches(code: str) -> Iterator[_Branch]:
    for pattern in _BRANCHES:
        for found in pattern.finditer(code):
            key, value = (tuple(_strip_quotes(_ATOMS.findall(found[name]))) for name in ("key", "value"))
            if key and value:
                yield _Branch(key, value, " ".join(found[0].split()))


def _cases(tests: str) -> Iterator[tuple[str, ...]]:
    for line in tests.splitlines():
        objects = _OBJECTS.findall(line) if line.lstrip()[:1] in ("[", "{") else []
        if not objects and not _ASSERTS.search(line):
            continue
        for part in objects or [line]:
            if atoms := tuple(_strip_quotes(_ATOMS.findall(part))):
                yield atoms


def _is_case(branch: _Branch, case: tuple[str, ...]) -> bool:
    """All of its input and answer are values of this one case, the answer besides the input."""
    left = list(case)
    for one in (*branch.key, *branch.value):
        if one not in left:
            return False
        left.remove(one)
    return True


def _trivial(branch: _Branch) -> bool:
    return all(one in _TRIVIAL for one in (*branch.key, *branch.value))


def _all_in(atoms: Iterable[str], stated: set[str]) -> bool:
    return all(atom in stated or atom in _TRIVIAL for atom in atoms)


def _strip_quotes(atoms: Iterable[str]) -> Iterator[str]:
    return (atom.strip("'\"") for atom in atoms)
