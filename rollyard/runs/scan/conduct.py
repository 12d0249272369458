"""Scanners of how an attempt went: what broke it that was not the agent, and what the agent did instead of working."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from rollyard.runs.scan.agent_actions import AgentAction, AgentActions, Finding

_REPEATED = 6  # equal calls in a row with equal results
_BROKEN_TIMES = 3
_FETCHES = re.compile(
    r"\b(?:curl|wget|http|aria2c|lynx|w3m)\b[^|;&\n]{0,300}\w+\.\w+|\bgit\s+(?:-\S+\s+\S+\s+){0,4}(?:clone|ls-remote|fetch|pull|submodule)\b[^|;&\n]{0,300}(?:https?|git|ssh)(?:://|@)"
    r"|\burlopen\(|\burlretrieve\(|\brequests\.\w+\(|\bhttpx\.\w+\(|\bcreate_connection\(|\.connect\(\(|\bHTTPS?Connection\(|\bfetch\(['\"`]https?:"
    r"|\bgetent\s+(?:ahosts\w*|hosts)\b|/dev/tcp/|\b(?:ssh|scp|rsync|sftp|telnet|ftp)\s+(?:-\S+\s+(?:\w+=\S+\s+)?)*\S*[@.:]|\b(?:nc|ncat|ping|dig|nslookup)\s"
)
INSTALLS = re.compile(
    r"\bpip3?\s+(?:install|download)\b|\bnpm\s+(?:install|i|ci|add|view|info|search|pack|exec)\b|\b(?:yarn|pnpm)\s+(?:add|install)\b|\bnpx\s"
    r"|\bapt(?:-get)?\s+(?:update|install)\b|\bapk\s+add\b|\buv\s+(?:pip\s+install|add|sync|tool\s+install)\b|\bgo\s+(?:get|install|mod\s+download)\b"
    r"|\bcargo\s+(?:add|install|fetch|update)\b|\bgem\s+install\b|\bbundle\s+install\b|\bconda\s+install\b|\bmvn\s|\bgradle\s"
)
_NO_NETWORK = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ENETUNREACH|No route to host|NewConnectionError|Failed to establish a new connection"
    r"|getaddrinfo|fetch failed|no such host|dial tcp|bad address|failed to lookup address|[Cc]ouldn't connect|name resolution"
    r"|Connection refused|from versions: none|externally-managed-environment"
    r"|No matching distribution found|/dev/tcp/\S+: |[Ff]ailed to download"
    r"|[Uu]nable to (?:access|connect|resolve)"
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
# Codex, of each run
_TOLD_OF_RUN = re.compile(r"^(?:Chunk ID|Wall time|Process running|Original token count)\b.*$", re.MULTILINE)
_COMMENT = re.compile(r"\s+#[^\n'\"]*$", re.MULTILINE)
_NUMBERS = re.compile(r"\d+")
_TIMINGS = re.compile(r"\b\d+(?:\.\d+)?\s?(?:s|ms|sec|seconds)\b|0x[0-9a-f]{6,}|\b\d+\.\d{3,}\b")
_MACHINE_ERRORS = (  # of the machine, whatever program meets them
    "ENOSPC", "EDQUOT", "ENOMEM", "EROFS", "EIO", "EMFILE", "ENFILE", "ESTALE", "ENOEXEC", "EAGAIN", "ENODEV", "ENXIO", "EUCLEAN",
    "ENOSYS", "ELIBBAD", "ELIBACC", "ENOTCONN", "EREMOTEIO", "ENOMEDIUM",
)  # fmt: skip
_ENVIRONMENT = re.compile(
    "|".join(re.escape(os.strerror(getattr(errno, name))) for name in _MACHINE_ERRORS)
    + rf"|\b(?:{'|'.join(_MACHINE_ERRORS)})\b"
    + r"|\bI/O error|cannot fork|fork: retry|\bMemoryError\b|out of memory|cannot execute binary file"
    r"|(?:GLIBC|GLIBCXX|CXXABI)_\S+?'? not found|cannot open shared object file",
    re.IGNORECASE,
)
_OTHERS_TOOL = re.compile(
    r"\s*(?:python3?|pip3?|node|npm|git|gcc|g\+\+|cc|make|go|cargo|rustc|java|ruby|perl|ls|cat|sh|bash)\s"
)
# Of a tool that is not the agent's own
_CRASHED = re.compile(
    r"Segmentation fault|Bus error|Illegal instruction|\bKilled\b"
    r"|(?:exit|exited with|exit code:?) (?:code:? )?(?:13[24579]|-(?:4|6|7|9|11))\b",
    re.IGNORECASE,
)
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
_BRIEF = 1_000  # characters: an answer in words is longer, or says no such thing
_NEGATES = re.compile(  # of an agent that had tools, used none and earned nothing
    r"\b(?:not|no|never|nor|cannot|\w+n['\u2019]t|den(?:y|ied)|decline\w*|refuse\w*|reject\w*|unable|unwilling|sorry|apologi\w+"
    r"|unfortunately|regret\w*|rather|pass on|abstain|instead of|harm\w*|unethical|inappropriate|policy|policies"
    r"|dishonest\w*|cheat\w*|(?:leave|left) (?:\w+ ){1,3}to you"
    r"|leider|nicht|kein\w*|d\u00e9sol\u00e9\w*|ne peux pas|lo siento|no puedo|desculpe|n\u00e3o posso|mi dispiace|non posso)\b"
    r"|\u62b1\u6b49|\u65e0\u6cd5|\u4e0d\u80fd|\u3067\u304d\u307e\u305b\u3093|\u7533\u3057\u8a33"
    r"|\u043d\u0435 \u043c\u043e\u0433\u0443|\u0438\u0437\u0432\u0438\u043d\u0438\u0442\u0435",
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
_IDLE_S = 30.0
_WORKS = re.compile(
    r"(?:(?<![\w/.-])|(?<=bin/))(?:make|cmake|ninja|pytest|unittest|tox|nox|npm|npx|yarn|pnpm|jest|mocha|cargo|rustc|go|gcc|cc|g\+\+|clang|javac?|mvn|gradle|ruby|rake|bundle|prove|pip3?|uv|apt(?:-get)?"
    r"|apk|docker|git|find|grep|rg|tar|curl|wget|bench|train|server?|psql|mysql|sqlite3)\b|-m\s+\w"
)
_LONGEST_PERIOD = 4
_NOTHING_NEW = 8  # calls in a row whose results had all been there before
_LITTLE = 12  # characters of a result that says nothing by itself
_FAILED = re.compile(r"\bfail(?:ed|ure)?\b|\berror\b|not found|no match|could not", re.IGNORECASE)
_LINE_NUMBER = re.compile(r"^\s*\d+[\t:|\u2192 ]")
_CHANGES = re.compile(
    r"(?<![12&])>(?!\s*/dev/null|&|\s*/tmp/)|\bsed\s+-i|\btee\b|\bpatch\b|\bgit\s+(?:add|commit|apply|checkout|stash|reset|merge)|\b(?:mv|cp|rm|touch|mkdir)\s"
    r"|write_text|open\([^)]*['\"][wa]"
)


def scan_network(actions: AgentActions) -> Iterator[Finding]:
    """Reaching for a network that the task does not have: a failure may be the missing package's. A package that could not be
    installed, and without which the task was done, is no finding."""
    done = (actions.rollout.reward or 0) > 0
    for action in actions.tools:
        text = action.executed
        if _HERE.search(text) and not _ELSEWHERE.search(text):
            continue
        found = _FETCHES.search(text) or (None if done else INSTALLS.search(text))
        said = _NO_NETWORK.search(action.result)
        if found is None:
            out = _NO_WAY_OUT.search(action.result)
            if (
                out is not None
                and out[0] not in action.command
                and not (_READS_FILES.match(text) or INSTALLS.search(text))
            ):
                yield actions.find_in_call("network", "failure", f"it reached for a network: {out[0]}", action)
                return
            continue
        if said is None and _FETCHED_SILENTLY.search(text):
            said = _SILENT_EXIT.search(action.result)
        if said is None and not _OWN_FOLDER.search(text):  # where the program is missing, what it would fetch is too
            said = _NO_PROGRAM.search(action.result)
        nowhere = (actions.rollout.task.network or "none") == "none" and _ELSEWHERE.search(text)
        if said or nowhere or (_NO_END.search(action.result) and not _OWN_FOLDER.search(text)):
            message = f"it reached for a network: {said[0] if said else 'no answer'}"
            yield actions.find_in_call("network", "failure", message, action, found[0])
            return


def scan_environment(actions: AgentActions) -> Iterator[Finding]:
    """The machine, not the agent, was in the way."""
    met = [
        (action, found)
        for action in actions.tools
        if (found := _ENVIRONMENT.search(action.result))
        or (_OTHERS_TOOL.match(action.command) and (found := _CRASHED.search(action.result)))
    ]
    if len(met) >= _BROKEN_TIMES:
        action, found = met[0]
        yield actions.find(
            "environment",
            "failure",
            f"the environment was broken, {len(met)} times: {found[0]}",
            where="tool result",
            excerpt=_line(action.result, found),
            call=action.call,
        )


def scan_loops(actions: AgentActions) -> Iterator[Finding]:
    """The same call with the same result, again and again; or the same few in turns."""
    keys = [_loop_key(action) for action in actions.tools]
    for period in range(1, _LONGEST_PERIOD + 1):
        alike = 0
        for at in range(period, len(keys)):
            alike = alike + 1 if keys[at] == keys[at - period] else 0
            times = _REPEATED if period == 1 else _REPEATED - 1
            if alike == period * (times - 1):
                first = actions.tools[at + 1 - period * times]
                what = f"{first.tool} was called" if period == 1 else f"{period} calls were made in turns"
                yield actions.find_in_call("loops", "failure", f"{what} {times} times or more, alike", first)
                return
    if (first := _find_nothing_new(actions.tools)) is not None:
        yield actions.find_in_call("loops", "failure", f"{_NOTHING_NEW} calls or more in a row told nothing new", first)


def _find_nothing_new(tools: tuple[AgentAction, ...]) -> AgentAction | None:
    """The first of many calls in a row that told nothing which had not been told before, by whatever command."""
    seen: set[tuple[str, str]] = set()
    idle: list[AgentAction] = []
    for action in tools:
        key = _result_content(action)
        idle = [*idle, action] if key in seen else []
        seen.add(key)
        if len(idle) >= _NOTHING_NEW:
            return idle[0]
    return None


def _result_content(action: AgentAction) -> tuple[str, str]:
    """The content of a call's result, without timings and line numbers. One that says little or changes files is told by
    its command."""
    lines = (
        _LINE_NUMBER.sub("", line).strip()
        for line in _TIMINGS.sub("", _TOLD_OF_RUN.sub("", action.result)).splitlines()
    )
    result = "\n".join(filter(None, lines))
    changes = not _FAILED.search(result) if action.writes else _CHANGES.search(action.command)
    silent = len(result) < _LITTLE or changes
    return (_COMMENT.sub("", action.command) if silent else ""), result


def _loop_key(action: AgentAction) -> tuple[str, str, str]:
    """A comment or another number makes no other call of one that gave the same answer."""
    result = _TIMINGS.sub("", _TOLD_OF_RUN.sub("", action.result))
    command = _COMMENT.sub("", action.command)
    return action.tool, _NUMBERS.sub("0", command) if result.strip() else command, result


def scan_refusals(actions: AgentActions) -> Iterator[Finding]:
    """The last words decline the task."""
    if not actions.said:
        return
    call, text = actions.said[-1]
    idle = None if actions.changes else _REFUSES_IDLE.search(text)
    if idle is None and not actions.changes and not actions.tools and not actions.rollout.reward and len(text) < _BRIEF:
        idle = _NEGATES.search(text)
    if (
        found := _REFUSES.search(text)
        or idle
        or (None if actions.changes or actions.tools else _UNWILLING.search(text))
    ):
        yield actions.find(
            "refusals", "failure", "the model declined", where="last words", excerpt=_line(text, found), call=call
        )


def scan_waiting(actions: AgentActions) -> Iterator[Finding]:
    """Sleeping towards the deadline, in one call or in many."""
    slept = 0.0
    for action in actions.tools:
        slept += _seconds_asleep(action.executed)
        cut_off = action is actions.tools[-1] and actions.rollout.status == "timeout" and not action.result.strip()
        if cut_off or _NO_END.search(action.result):
            slept += _seconds_paused(action.executed)
        if slept >= _LONG_SLEEP_S:
            length = "without end" if slept == math.inf else f"for {slept:.0f} s"
            yield actions.find_in_call("waiting", "both", f"it slept {length}", action)
            return
    if (waited := _idle_at_end(actions)) >= _IDLE_S:
        message = f"the deadline came {waited:.0f} s into a call that has nothing to do with the task"
        yield actions.find_in_call("waiting", "both", message, actions.tools[-1])


def _idle_at_end(actions: AgentActions) -> float:
    """Seconds from the last answer to the deadline, where the call that it made never came back and names no file of the task,
    no program of its own and no tool that builds, tests or fetches."""
    trajectory = actions.rollout.trajectory
    if actions.rollout.status != "timeout" or not actions.tools or trajectory is None or not trajectory.records:
        return 0.0
    last, action = trajectory.records[-1], actions.tools[-1]
    if (
        action.call != last.seq
        or last.finished_at is None
        or (action.result.strip() and not _NO_END.search(action.result))
    ):
        return 0.0
    own = {PurePosixPath(path).name for path in (*actions.judges.there, *(change.path for change in actions.changes))}
    if action.scripts or _WORKS.search(action.executed) or any(name in action.executed for name in own):
        return 0.0
    ended = max(
        (stage.started_at + stage.duration_s for stage in actions.rollout.stages if stage.name == "wait"), default=0.0
    )
    return ended - last.finished_at


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
