"""Scanners of how an attempt went: what broke it that was not the agent, and what the agent did instead of working."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from rollyard.runs.scan.deeds import Deed, Deeds, Finding

_REPEATED = 6  # equal calls in a row with equal results
_BROKEN_TIMES = 3
_FETCHES = re.compile(
    r"\b(?:curl|wget|http|aria2c|lynx|w3m)\b[^|;&\n]{0,300}\w+\.\w+|\bgit\s+(?:-\S+\s+\S+\s+){0,4}(?:clone|ls-remote|fetch|pull|submodule)\b[^|;&\n]{0,300}(?:https?|git|ssh)(?:://|@)"
    r"|\burlopen\(|\burlretrieve\(|\brequests\.\w+\(|\bhttpx\.\w+\(|\bcreate_connection\(|\.connect\(\(|\bHTTPS?Connection\(|\bfetch\(['\"`]https?:"
    r"|\bgetent\s+(?:ahosts\w*|hosts)\b|/dev/tcp/|\b(?:ssh|scp|rsync|sftp|telnet|ftp)\s+(?:-\S+\s+(?:\w+=\S+\s+)?)*\S*[@.:]|\b(?:nc|ncat|ping|dig|nslookup)\s"
)
_INSTALLS = re.compile(
    r"\bpip3?\s+(?:install|download)\b|\bnpm\s+(?:install|i|ci|add)\b|\b(?:yarn|pnpm)\s+(?:add|install)\b|\bnpx\s"
    r"|\bapt(?:-get)?\s+(?:update|install)\b|\bapk\s+add\b|\buv\s+(?:pip\s+install|add|sync|tool\s+install)\b|\bgo\s+(?:get|install|mod\s+download)\b"
    r"|\bcargo\s+(?:add|install|fetch|update)\b|\bgem\s+install\b|\bbundle\s+install\b|\bconda\s+install\b|\bmvn\s|\bgradle\s"
)
_NO_NETWORK = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ENETUNREACH|No route to host|NewConnectionError|Failed to establish a new connection"
    r"|getaddrinfo|fetch failed|no such host|dial tcp|bad address|failed to lookup address|[Cc]ouldn't connect|name resolution"
    r"|Connection refused|/dev/tcp/\S+: |[Ff]ailed to download|[Uu]nable to (?:access|connect|resolve)"
)
_NO_PROGRAM = re.compile(
    r"\b(?:pip3?|uv|npm|apt(?:-get)?|curl|wget|go|cargo|ssh|nc|ping)\b.{0,3}: (?:command )?not found"
    r"|No module named '?(?:pip|requests|httpx)\b"
)
_NO_WAY_OUT = re.compile(  # whatever program said it
    r"Could not resolve host|Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|No route to host|\bENETUNREACH\b|\bEAI_AGAIN\b|\bENOTFOUND\b|\bEHOSTUNREACH\b|no such host"
)
_READS_FILES = re.compile(r"^\s*(?:cat|less|head|tail|grep|rg|sed|awk|more|echo|printf)\b")
_FETCHED_SILENTLY = re.compile(r"\b(?:curl|wget)\b")
_SILENT_EXIT = re.compile(
    r"exit code (?:4|6|7|28)\b|Exit code: (?:4|6|7|28)\b|exited with code (?:4|6|7|28)\b", re.IGNORECASE
)
_HERE = re.compile(r"\b(?:localhost|127\.0\.0\.1|0\.0\.0\.0)\b|\[::1\]")
_ELSEWHERE = re.compile(
    r"(?:https?|git|ssh)://(?!localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])|/dev/tcp/(?!localhost|127\.)"
)
_OWN_FOLDER = re.compile(r"\bpip3?\s+install\s+(?:-\S+\s+){0,4}\.")  # what lies here needs no network
_NO_END = re.compile(  # codex goes on before a command has ended, others end it
    r"Process running with session ID|timed out after \d+|Command timed out|exceeded (?:the )?timeout", re.IGNORECASE
)
_TOLD_OF_RUN = re.compile(
    r"^(?:Chunk ID|Wall time|Process running|Original token count)\b.*$", re.MULTILINE
)  # codex, of each run
_COMMENT = re.compile(r"\s+#[^\n'\"]*$", re.MULTILINE)
_NUMBERS = re.compile(r"\d+")
_TIMINGS = re.compile(r"\b\d+(?:\.\d+)?\s?(?:s|ms|sec|seconds)\b|0x[0-9a-f]{6,}")
_ENVIRONMENT = re.compile(
    r"No space left on device|\bI/O error|Input/output error|Cannot allocate memory|Read-only file system"
    r"|\b(?:ENOSPC|EROFS|EMFILE|ENOMEM|EDQUOT)\b|Resource temporarily unavailable|Too many open files|Disk quota exceeded"
    r"|cannot fork|fork: retry|\bMemoryError\b|out of memory"
    r"|GLIBC_\S+' not found|cannot open shared object file",
    re.IGNORECASE,
)
_OTHERS_TOOL = re.compile(
    r"\s*(?:python3?|pip3?|node|npm|git|gcc|g\+\+|cc|make|go|cargo|rustc|java|ruby|perl|ls|cat|sh|bash)\s"
)
_CRASHED = re.compile(r"Segmentation fault|Bus error|Illegal instruction")  # of a tool that is not the agent's own
_CANNOT = r"(?:can(?:no|['\u2019])t|won['\u2019]t|will not|unable to|not able to|not going to|refuse to|decline to|rather not)"
_REFUSES = re.compile(
    rf"\bI(?:['\u2019]m| am|['\u2019]d)? (?:sorry, but I )?(?:must )?{_CANNOT} "
    r"(?:help(?! but| myself)|assist|comply|fulfil|do that\b|continue with (?:this|that) (?:request|task))|\bI must decline\b"
    r"|\bagainst my (?:guidelines|polic(?:y|ies))|\b(?:have|need) to (?:refuse|decline)\b"
    r"|\bnot (?:feel )?comfortable (?:doing|making|with)\b",
    re.IGNORECASE,
)
_REFUSES_IDLE = re.compile(  # of an agent that changed nothing
    rf"\b{_CANNOT} (?:do|continue|proceed|edit|change|modify|write|perform|complete|engage|support)\b"
    rf"(?![^.]*\b(?:missing|not installed|not found)\b)|\b(?:safety|content|usage) (?:guidelines|polic(?:y|ies))\b"
    rf"|\bI {_CANNOT}\s*[.!]|\bsomething I (?:won['\u2019]t|can['\u2019]t|will not) do\b",
    re.IGNORECASE,
)
_UNWILLING = re.compile(  # of an agent that did not even look
    r"\b(?:declin\w+|refus\w+|can(?:no|['\u2019])t|won['\u2019]t|will not|unable|not able"
    r"|not (?:be )?(?:allowed|permitted|comfortable|appropriate)"
    r"|isn['\u2019]t something|(?:do|does) not allow|outside (?:of )?what|guidelines?|as an AI)\b",
    re.IGNORECASE,
)
_SLEEP = re.compile(
    r"(?:\btimeout\s+(?:-\S+\s+){0,4}(\d+(?:\.\d+)?)([smhd]?)\s+)?(?:(?<=[\s;&|({'\"])|^)sleep[\s(]+(\d+(?:\.\d+)?|inf\w*)([smhd]?)\b"
    r"(?!\s*&(?!&)(?![\s\S]{0,200}\bwait\b))|(?:time|asyncio)\.sleep\((\d+(?:\.\d+)?)\)|setTimeout\([\s\S]{0,300}?,\s*(\d{4,})\)",
    re.MULTILINE,
)
_PAUSES = re.compile(
    r"\b\w*(?:wait|select|sleep|pause|delay|poll|alarm|timer)\w*[\s(][^;\n]{0,80}?\b(\d{3,9})\b", re.IGNORECASE
)
_TIMES = re.compile(r"\bfor\s+\w+\s+in\s+(?:\$\(seq\s+(?:1\s+)?(\d+)\)|\{1\.\.(\d+)\}|range\((\d+)\))")
_FOREVER = r"\b(?:while\s+(?:true|:|True|1|\[\s*1\s*\]|\(true\)|\(1\))|until\s+false)\s*[;:{]"
_ENDLESS = re.compile(
    rf"{_FOREVER}(?:(?!\bbreak\b)[\s\S]){{0,400}}?\bsleep\b(?![\s\S]{{0,400}}\bbreak\b)"
    rf"|{_FOREVER}\s*(?:do\s+(?::|true)|pass|\}})\s*(?:[;}}]|$)|\btail\s+-f\s+/dev/null|\bEvent\(\)\.wait\(\)"
)
_BOUNDED = re.compile(r"\btimeout\s+(?:-\S+\s+){0,4}(\d+(?:\.\d+)?)([smhd]?)\s+(?:sh|bash)\b")
_BACKGROUND = re.compile(r"&\s*(?:$|\n|[^&>\s])(?![\s\S]{0,200}\bwait\b)")
_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_LONG_SLEEP_S = 300.0
_LONGEST_PERIOD = 4


def scan_network(deeds: Deeds) -> Iterator[Finding]:
    """Reaching for a network that the task does not have: a failure may be the missing package's. A package that could not be
    installed, and without which the task was done, is no finding."""
    done = (deeds.rollout.reward or 0) > 0
    for deed in deeds.tools:
        text = deed.executed
        if _HERE.search(text) and not _ELSEWHERE.search(text):
            continue
        found = _FETCHES.search(text) or (None if done else _INSTALLS.search(text))
        said = _NO_NETWORK.search(deed.result)
        if found is None:
            out = _NO_WAY_OUT.search(deed.result)
            if (
                out is not None
                and out[0] not in deed.command
                and not (_READS_FILES.match(text) or _INSTALLS.search(text))
            ):
                yield deeds.find_in_call("network", "failure", f"it reached for a network: {out[0]}", deed)
                return
            continue
        if said is None and _FETCHED_SILENTLY.search(text):
            said = _SILENT_EXIT.search(deed.result)
        if said is None and not _OWN_FOLDER.search(text):  # where the program is missing, what it would fetch is too
            said = _NO_PROGRAM.search(deed.result)
        if said or (_NO_END.search(deed.result) and not _OWN_FOLDER.search(text)):
            message = f"it reached for a network: {said[0] if said else 'no answer'}"
            yield deeds.find_in_call("network", "failure", message, deed, found[0])
            return


def scan_environment(deeds: Deeds) -> Iterator[Finding]:
    """The machine, not the agent, was in the way."""
    met = [
        (deed, found)
        for deed in deeds.tools
        if (found := _ENVIRONMENT.search(deed.result))
        or (_OTHERS_TOOL.match(deed.command) and (found := _CRASHED.search(deed.result)))
    ]
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
    keys = [_loop_key(deed) for deed in deeds.tools]
    for period in range(1, _LONGEST_PERIOD + 1):
        alike = 0
        for at in range(period, len(keys)):
            alike = alike + 1 if keys[at] == keys[at - period] else 0
            times = _REPEATED if period == 1 else _REPEATED - 1
            if alike == period * (times - 1):
                first = deeds.tools[at + 1 - period * times]
                what = f"{first.tool} was called" if period == 1 else f"{period} calls were made in turns"
                yield deeds.find_in_call("loops", "failure", f"{what} {times} times or more, alike", first)
                return


def _loop_key(deed: Deed) -> tuple[str, str, str]:
    """A comment or another number makes no other call of one that gave the same answer."""
    result = _TIMINGS.sub("", _TOLD_OF_RUN.sub("", deed.result))
    command = _COMMENT.sub("", deed.command)
    return deed.tool, _NUMBERS.sub("0", command) if result.strip() else command, result


def scan_refusals(deeds: Deeds) -> Iterator[Finding]:
    """The last words decline the task."""
    if not deeds.said:
        return
    call, text = deeds.said[-1]
    idle = None if deeds.changes else _REFUSES_IDLE.search(text)
    if found := _REFUSES.search(text) or idle or (None if deeds.changes or deeds.tools else _UNWILLING.search(text)):
        yield deeds.find(
            "refusals", "failure", "the model declined", where="last words", excerpt=_line(text, found), call=call
        )


def scan_waiting(deeds: Deeds) -> Iterator[Finding]:
    """Sleeping towards the deadline, in one call or in many."""
    slept = 0.0
    for deed in deeds.tools:
        slept += _seconds_asleep(deed.executed)
        if deed is deeds.tools[-1] and deeds.rollout.status == "timeout" and not deed.result.strip():
            slept += _seconds_paused(deed.executed)
        if slept >= _LONG_SLEEP_S:
            told = "without end" if slept == math.inf else f"for {slept:.0f} s"
            yield deeds.find_in_call("waiting", "both", f"it slept {told}", deed)
            return


def _seconds_asleep(command: str) -> float:
    bounded = _BOUNDED.search(command)
    most = float(bounded[1]) * _UNIT[bounded[2]] if bounded else math.inf
    if (endless := _ENDLESS.search(command)) and not _BACKGROUND.search(command, endless.end()):
        return most
    seconds = sum(map(_one_sleep, _SLEEP.finditer(command)))
    times = _TIMES.search(command)
    return min(most, seconds * int(next(filter(None, times.groups()))) if times else seconds)


def _seconds_paused(command: str) -> float:
    """By any function that waits, in a call that never came back."""
    return sum(float(found[1]) / (1000 if float(found[1]) >= 100_000 else 1) for found in _PAUSES.finditer(command))


def _one_sleep(found: re.Match[str]) -> float:
    most, most_unit, given, unit, python, milliseconds = found.groups()
    if milliseconds:
        return float(milliseconds) / 1000
    asleep = float(python) if python else math.inf if given.startswith("inf") else float(given) * _UNIT[unit]
    return min(asleep, float(most) * _UNIT[most_unit] if most else math.inf)


def _line(text: str, found: re.Match[str]) -> str:
    start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[start : end if end >= 0 else len(text)]
