"""What a task itself asks for: an agent that has to write tests may change them, one that has to read a file may."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Literal

TestWork = Literal["change", "remove", "skip"]
_SENTENCE = re.compile(r"(?<=[.;!?:])\s+|\n+")
_VERBS: dict[TestWork, str] = {
    "change": (
        r"add|write|extend|update|change|edit|rename|move|rewrite|create|improve|port|convert|migrate|adapt|adjust|cover"
        r"|turn on|enable|configure|set up|implement|refactor|replace|delete|remove|drop|split|merge|parametri[sz]e|expand|give"
        r"|compare|let"
    ),
    "remove": r"delete|remove|drop|move|rename|merge|split|clean up",
    "skip": r"skip|disable|mark|xfail|deselect|exclude|ignore",
}
_TESTS = (
    r"tests?\b|test (?:suite|case|file)s?|unit tests?|test_\w+|assertions?|fixtures?|conftest|specs?\b|pytest\b"
    r"|\S*\b(?:tests?|spec)/\S+|\S+_test\.\w+"
)
_CLAUSE = r"\b(?:so|that|until|because|which|when|while|make|makes|sure|pass|passes|against|run|running|without|like)\b"
_GOAL = re.compile(r"^\W*(?:\S+\W+){0,2}(?:pass|passes|succeed|green|fails?|run|runs|checks?|shows?|says?)\b")
_NOT = re.compile(r"\b(?:not|never|without|don['\u2019]t|must(?:n['\u2019]t| not)|no)\b[^,]{0,30}$", re.IGNORECASE)
_FORBIDDEN = re.compile(
    r"\b(?:do not|don['\u2019]t|never|must not|without|may not|not allowed to)\b[^.;\n]{0,40}"
    r"\b(?:chang|edit|modify|touch|alter|delet|remov)\w*[^.;\n]{0,30}\btests?\b",
    re.IGNORECASE,
)
_GIT_WORK = re.compile(
    r"\b(?:reflog|stash\w*|dangling|unreachable|lost commit|git (?:history|log)|commit history|history of|recover\w*|all branches"
    r"|other branch\w*|merge|rebase|cherry-pick|bisect|fetch|git pull|upstream branch|remote branch)\b",
    re.IGNORECASE,
)


def asks_for(work: TestWork, instruction: str, path: str) -> bool:
    """Whether the instruction has such work done to tests, this file among them. A sentence that only says which tests shall pass
    asks for none, and one that forbids it forbids all."""
    if _FORBIDDEN.search(instruction):
        return False
    name = PurePosixPath(path).name
    nouns = rf"(?:{_TESTS}|{re.escape(path)}|{re.escape(name)})"
    wanted = re.compile(rf"\b(?:{_VERBS[work]})\b(?P<between>.{{0,80}}?)(?P<noun>{nouns})(?P<after>.*)", re.IGNORECASE)
    return any(_asks(sentence, wanted) for sentence in _SENTENCE.split(instruction))


def _asks(sentence: str, wanted: re.Pattern[str]) -> bool:
    for found in _find_all(wanted, sentence):
        if re.search(_CLAUSE, found["between"]) or _NOT.search(sentence[: found.start()]):
            continue
        if not _GOAL.match(found["after"]):
            return True
    return False


def _find_all(wanted: re.Pattern[str], sentence: str) -> Iterator[re.Match[str]]:
    """Each place where it could begin, overlapping ones too."""
    at = 0
    while found := wanted.search(sentence, at):
        yield found
        at = found.start() + 1


def names_file(instruction: str, path: str) -> bool:
    """Whether the instruction speaks of this file, by its path or name; of one of the same name elsewhere it does not."""
    clean = path.removeprefix("./").removeprefix("/app/")
    name = re.escape(PurePosixPath(clean).name)
    named = re.findall(rf"(?<![\w./-])([\w./-]*(?<![\w.-]){name})(?![\w-])", instruction)
    return any(f"/{clean}".endswith(f"/{one.removeprefix('./').lstrip('/')}") for one in named)


def is_about_git(instruction: str) -> bool:
    return _GIT_WORK.search(instruction) is not None
