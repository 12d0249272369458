"""Scanners of how an attempt went: what broke it that was not the agent, and what the agent did instead of working."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from rollyard.runs.scan.deeds import Deeds, Finding

_REPEATED = 6  # equal calls in a row with equal results
_BROKEN_TIMES = 3
_NETWORK = re.compile(
    r"\b(?:curl|wget)\b[^|;&\n]*\w+\.\w+|\bpip3?\s+(?:install|download)\b|\bnpm\s+(?:install|i|ci)\b|\bapt(?:-get)?\s+(?:update|install)\b"
    r"|\bgit\s+clone\s+(?:https?|git|ssh)|\burllib\.request\.urlopen|\burlopen\(|\brequests\.(?:get|post)\("
    r"|\bcreate_connection\(|\bHTTPS?Connection\(|\bgetent\s+(?:ahosts\w*|hosts)\b|\buv\s+(?:pip\s+install|add|tool\s+install)\b"
)
_NO_NETWORK = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|No route to host|NewConnectionError|Failed to establish a new connection"
)
_NO_PROGRAM = re.compile(
    r"\b(?:pip3?|uv|npm|apt(?:-get)?|curl|wget)\b.{0,3}: (?:command )?not found|No module named '?pip\b"
)
_OWN_FOLDER = re.compile(r"\bpip3?\s+install\s+(?:-\S+\s+)*\.")  # what lies here needs no network
_STILL_RUNNING = "Process running with session ID"  # codex goes on before a command has ended
_TOLD_OF_RUN = re.compile(
    r"^(?:Chunk ID|Wall time|Process running|Original token count)\b.*$", re.MULTILINE
)  # codex, of each run
_ENVIRONMENT = re.compile(
    r"No space left on device|I/O error|Input/output error|Cannot allocate memory|Read-only file system"
    r"|Resource temporarily unavailable|Too many open files|Disk quota exceeded"
    r"|GLIBC_\S+' not found|cannot open shared object file"
)
_REFUSES = re.compile(
    r"\bI(?:['\u2019]m| am) (?:sorry, but I )?(?:can(?:no|['\u2019])t|unable to|not able to) "
    r"(?:help|assist|do that|comply|continue)"
    r"|\bI (?:can(?:no|['\u2019])t|won['\u2019]t|will not) (?:help|assist|comply|do that|continue)|\bI must decline\b"
    r"|\bagainst my (?:guidelines|policy)|\b(?:have|need) to (?:refuse|decline)\b|\bnot comfortable (?:doing|with)\b",
    re.IGNORECASE,
)
_SLEEP = re.compile(
    r"(?:\btimeout\s+(?:-\S+\s+)*(\d+(?:\.\d+)?)([smhd]?)\s+)?(?:(?<=[\s;&|({])|^)sleep\s+(\d+(?:\.\d+)?|inf\w*)([smhd]?)\b(?!\s*&(?!&))"
    r"|time\.sleep\((\d+(?:\.\d+)?)\)",
    re.MULTILINE,
)
_TIMES = re.compile(r"\bfor\s+\w+\s+in\s+(?:\$\(seq\s+(?:1\s+)?(\d+)\)|\{1\.\.(\d+)\}|range\((\d+)\))")
_ENDLESS = re.compile(
    r"\b(?:while\s+(?:true|:|True|1|\[\s*1\s*\])|until\s+false)\s*[;:](?:(?!\bbreak\b)[\s\S])*\bsleep\b(?![\s\S]*\bbreak\b)|\btail\s+-f\s+/dev/null"
)
_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_LONG_SLEEP_S = 300.0
_LONGEST_PERIOD = 4


def scan_network(deeds: Deeds) -> Iterator[Finding]:
    """Reaching for a network that the task does not have: a failure may be the missing package's."""
    for deed in deeds.tools:
        found, said = _NETWORK.search(deed.command), _NO_NETWORK.search(deed.result)
        if said is None and not _OWN_FOLDER.search(
            deed.command
        ):  # where the program is missing, what it would fetch is too
            said = _NO_PROGRAM.search(deed.result)
        if found and (said or _STILL_RUNNING in deed.result):
            yield deeds.find(
                "network",
                "failure",
                f"it reached for a network: {said[0] if said else 'no answer'}",
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
    """The same call with the same result, again and again; or the same few in turns."""
    keys = [(deed.tool, deed.command, _TOLD_OF_RUN.sub("", deed.result)) for deed in deeds.tools]
    for period in range(1, _LONGEST_PERIOD + 1):
        alike = 0
        for at in range(period, len(keys)):
            alike = alike + 1 if keys[at] == keys[at - period] else 0
            if alike == period * (_REPEATED - 1):
                first = deeds.tools[at + 1 - period * _REPEATED]
                what = f"{first.tool} was called" if period == 1 else f"{period} calls were made in turns"
                yield deeds.find(
                    "loops",
                    "failure",
                    f"{what} {_REPEATED} times or more, alike",
                    where="tool call",
                    excerpt=first.command,
                    call=first.call,
                )
                return


def scan_refusals(deeds: Deeds) -> Iterator[Finding]:
    """The last words decline the task."""
    if deeds.said and (found := _REFUSES.search(deeds.said[-1][1])):
        call, text = deeds.said[-1]
        yield deeds.find(
            "refusals", "failure", "the model declined", where="last words", excerpt=_line(text, found), call=call
        )


def scan_waiting(deeds: Deeds) -> Iterator[Finding]:
    """Sleeping towards the deadline, in one call or in many."""
    slept = 0.0
    for deed in deeds.tools:
        slept += _seconds_asleep(deed.command)
        if slept >= _LONG_SLEEP_S:
            told = "without end" if slept == math.inf else f"for {slept:.0f} s"
            yield deeds.find(
                "waiting",
                "both",
                f"it slept {told}",
                where="tool call",
                excerpt=deed.command,
                call=deed.call,
            )
            return


def _seconds_asleep(command: str) -> float:
    if _ENDLESS.search(command):
        return math.inf
    seconds = 0.0
    for found in _SLEEP.finditer(command):
        most, most_unit, given, unit, python = found.groups()
        asleep = float(python) if python else math.inf if given.startswith("inf") else float(given) * _UNIT[unit]
        seconds += min(asleep, float(most) * _UNIT[most_unit] if most else math.inf)
    times = _TIMES.search(command)
    return seconds * int(next(filter(None, times.groups()))) if times else seconds


def _line(text: str, found: re.Match[str]) -> str:
    start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[start : end if end >= 0 else len(text)]
