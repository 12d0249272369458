"""Scanners of how an attempt went: what broke it that was not the agent, and what the agent did instead of working."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from rollyard.runs.scan.deeds import Deeds, Finding

_REPEATED = 6  # equal calls in a row with equal results
_BROKEN_TIMES = 3
_NETWORK = re.compile(
    r"\b(?:curl|wget)\b[^|;&\n]*\w+\.\w+|\bpip3?\s+(?:install|download)\b|\bnpm\s+(?:install|i|ci)\b|\bapt(?:-get)?\s+(?:update|install)\b"
    r"|\bgit\s+clone\s+(?:https?|git|ssh)|\burllib\.request\.urlopen|\brequests\.(?:get|post)\("
)
_NO_NETWORK = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|No route to host|NewConnectionError|Failed to establish a new connection"
)
_ENVIRONMENT = re.compile(
    r"No space left on device|Cannot allocate memory|Read-only file system|Resource temporarily unavailable|Too many open files"
    r"|Disk quota exceeded|GLIBC_\S+' not found|cannot open shared object file"
)
_REFUSES = re.compile(
    r"\bI(?:'m| am) (?:sorry, but I )?(?:can(?:no|')t|unable to|not able to) (?:help|assist|do that|comply|continue)"
    r"|\bI (?:can(?:no|')t|won't|will not) (?:help|assist|comply|do that)|\bI must decline\b|\bagainst my (?:guidelines|policy)",
    re.IGNORECASE,
)
_SLEEP = re.compile(r"(?:^|[;&|\n(]\s*)sleep\s+(\d+(?:\.\d+)?)\s*([smhd]?)\b|time\.sleep\((\d+(?:\.\d+)?)\)")
_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_LONG_SLEEP_S = 300.0


def scan_network(deeds: Deeds) -> Iterator[Finding]:
    """Reaching for a network that the task does not have: a failure may be the missing package's."""
    for deed in deeds.tools:
        if (found := _NETWORK.search(deed.command)) and (said := _NO_NETWORK.search(deed.result)):
            yield deeds.find(
                "network",
                "failure",
                f"it reached for a network: {said[0]}",
                where="tool call",
                excerpt=found[0],
                call=deed.call,
            )
            return


def scan_environment(deeds: Deeds) -> Iterator[Finding]:
    """The machine, not the agent, was in the way."""
    met = [(deed, found) for deed in deeds.tools if (found := _ENVIRONMENT.search(deed.result))]
    if len(met) >= _BROKEN_TIMES:
        deed, found = met[0]
        yield deeds.find(
            "environment",
            "failure",
            f"the environment was broken, {len(met)} times: {found[0]}",
            where="tool result",
            excerpt=_line(deed.result, found),
            call=deed.call,
        )


def scan_loops(deeds: Deeds) -> Iterator[Finding]:
    """The same call with the same result, again and again."""
    for (tool, command, _), run in groupby(deeds.tools, key=lambda deed: (deed.tool, deed.command, deed.result)):
        same = list(run)
        if len(same) >= _REPEATED:
            yield deeds.find(
                "loops",
                "failure",
                f"{tool} was called {len(same)} times alike",
                where="tool call",
                excerpt=command,
                call=same[0].call,
            )


def scan_refusals(deeds: Deeds) -> Iterator[Finding]:
    """The last words decline the task."""
    if deeds.said and (found := _REFUSES.search(deeds.said[-1][1])):
        call, text = deeds.said[-1]
        yield deeds.find(
            "refusals", "failure", "the model declined", where="last words", excerpt=_line(text, found), call=call
        )


def scan_waiting(deeds: Deeds) -> Iterator[Finding]:
    """Sleeping towards the deadline."""
    for deed in deeds.tools:
        seconds = sum(float(m[1] or m[3]) * _UNIT[m[2] or ""] for m in _SLEEP.finditer(deed.command))
        if seconds >= _LONG_SLEEP_S:
            yield deeds.find(
                "waiting",
                "both",
                f"it slept for {seconds:.0f} s",
                where="tool call",
                excerpt=deed.command,
                call=deed.call,
            )


def _line(text: str, found: re.Match[str]) -> str:
    start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[start : end if end >= 0 else len(text)]
