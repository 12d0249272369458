"""Runs one verifier: the first line of stdin says which and with what, the last line of stdout says how it ended.

What the verifier prints goes to a file of its own and is handed back with the end, so it can neither be lost nor be taken for
ours. Anything but a finite number, or something with a `score` that is one, is no score.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import linecache
import math
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from .environment import Awaited, LineChannel, VerifierEnvironment
from .names import CHOSEN, install, namespace

FILE = "verifier.py"
_MOST = 2**20
_ANSWERS = ("final_answer", "text_solution", "transcript", "answer")
Check = Callable[..., Any]
Ended = dict[str, Any]


def functions(names: dict[str, Any]) -> dict[str, Check]:
    """The functions that the code itself defines, in their order."""
    return {
        name: value for name, value in names.items() if inspect.isfunction(value) and value.__code__.co_filename == FILE
    }


def choose_check(found: dict[str, Check], wanted: str | None) -> Check:
    """The one asked for; else the one marked as the verifier, the first that takes an environment, the first."""
    if wanted and wanted in found:
        return found[wanted]
    if not found:
        raise LookupError("the verifier code defines no function")
    for check in found.values():
        if getattr(check, CHOSEN, False):
            return check
    for check in found.values():
        if next(iter(inspect.signature(check).parameters), "") in ("env", "environment", "before"):
            return check
    return next(iter(found.values()))


def arguments(check: Check, env: Any, request: Ended) -> tuple[list[Any], dict[str, Any]]:
    if request.get("pickled"):
        # The sender of this chose the code as well, and both run only here.
        sent: dict[str, Any] = pickle.loads(base64.b64decode(request["pickled"]))
        positional = [value for value in sent["args"][1:] if not (isinstance(value, dict) and set(value) == {"env"})]
        return [env, *positional], sent["kwargs"]
    known = {"env": env, "environment": env, "conversation": request.get("conversation")}
    known.update(dict.fromkeys(_ANSWERS, request.get("final_answer")))
    given: list[Any] = []
    for place, (name, parameter) in enumerate(inspect.signature(check).parameters.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            break
        if name in ("before", "after"):
            given.append(env.db("seed" if name == "before" else "current"))
        elif name in known:
            given.append(known[name])
        elif place < 2:
            given.append(env if place == 0 else request.get("final_answer"))
        elif parameter.default is not parameter.empty:
            break
        else:
            raise TypeError(f"the verifier has a parameter {name!r} that is never filled in")
    return given, {}


def score_of(result: Any) -> float | None:
    """None for what is no score."""
    if isinstance(result, dict):
        result = result.get("score")
    elif not isinstance(result, (int, float)):
        result = getattr(result, "score", None)
    if isinstance(result, (int, float)) and math.isfinite(result):
        return float(result)
    return None


def run(request: Ended, wire: LineChannel, ended: Ended) -> None:
    code = request["code"]
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    names = namespace(VerifierEnvironment)
    install(names)
    names["__name__"] = "verifier"
    exec(compile(code, FILE, "exec"), names)
    found = functions(names)
    ended["functions"] = list(found)
    check = choose_check(found, request.get("function"))
    env: Any = VerifierEnvironment(wire, request.get("env") or {})
    env = Awaited(env) if inspect.iscoroutinefunction(check) else env
    positional, named = arguments(check, env, request)
    result = check(*positional, **named)
    if inspect.isawaitable(result):
        result = asyncio.run(_wait_for(result))
    ended["score"] = score_of(result)
    ended["result"] = _plain(result)
    if ended["score"] is None:
        ended["error"] = {"type": "NoScore", "message": f"the verifier gave {_show_value(result)}, which is no score"}


async def _wait_for(result: Any) -> Any:
    return await result


def failure(error: BaseException) -> dict[str, Any]:
    """The line is the last one of the verifier's own code that the error passed through."""
    made: dict[str, Any] = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    if isinstance(error, SyntaxError) and error.filename == FILE:
        made.update(line=error.lineno, text=(error.text or "").strip())
    elif lines:
        made.update(line=lines[-1].lineno, text=lines[-1].line)
    return made


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    answers = os.fdopen(os.dup(0), encoding="utf-8")
    printed = tempfile.TemporaryFile()
    os.dup2(printed.fileno(), 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    wire = LineChannel(out, answers)
    request = json.loads(answers.readline())
    ended: Ended = {"functions": [], "score": None, "result": None, "error": None}
    try:
        run(request, wire, ended)
    except BaseException as error:  # noqa: BLE001 - user code, SystemExit included: its end is what this program reports
        ended["error"] = failure(error)
    sys.stdout.flush()
    size = os.fstat(printed.fileno()).st_size
    ended["stdout"] = os.pread(printed.fileno(), _MOST, max(0, size - _MOST)).decode("utf-8", "backslashreplace")
    wire.tell({"ended": ended})
    os._exit(0)


def _plain(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return None


def _show_value(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:100]!r}" if value is not None else "None"
