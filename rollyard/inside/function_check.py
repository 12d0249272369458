"""Tests of functions, with the code under test in a process of its own: `python3 -I function_check.py CASES.json`.

The file's `tests` run here. A function of theirs that the solution defines is a call to the other process, so nothing of the
solution's runs where the result is made; the exit code says whether all passed. Tests that use the solution's classes or modules
(`together`) run beside it. Values travel by kind, never as code. The file is removed before the solution runs, and no process of
the same user may read this one's memory: the expected values stand in both.
"""

import ast
import builtins
import collections
import ctypes
import json
import os
import signal
import subprocess
import sys

_PLAIN = (str, bool, int, type(None))
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
_MAPPINGS = {"dict": dict, "Counter": collections.Counter, "OrderedDict": collections.OrderedDict}
_NOBODY = 65534
_PR_SET_DUMPABLE = 4


def encode(value):
    """A value as JSON that keeps its kind. An iterator travels as one over what it gives."""
    kind = type(value)
    if kind in _PLAIN:
        return ["plain", value]
    if kind in (float, complex):
        return [kind.__name__, repr(value)]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is type and getattr(builtins, value.__name__, None) is value:
        return ["type", value.__name__]
    for name, known in _SEQUENCES.items():
        if kind is known:
            return [name, [encode(item) for item in value]]
    if isinstance(value, dict):
        name = kind.__name__ if kind.__name__ in _MAPPINGS else "dict"
        return [name, [[encode(key), encode(item)] for key, item in value.items()]]
    if isinstance(value, tuple):
        return ["tuple", [encode(item) for item in value]]
    if hasattr(value, "__next__"):
        return ["iterator", [encode(item) for item in value]]
    if isinstance(value, (range, type({}.keys()), type({}.values()), type({}.items()))):
        return ["list", [encode(item) for item in value]]
    raise TypeError("a %s cannot be told to the tests" % kind.__name__)


def decode(given):
    kind, value = given
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item) for item in value)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(key): decode(item) for key, item in value})
    if kind == "iterator":
        return iter([decode(item) for item in value])
    if kind in ("float", "complex"):
        return getattr(builtins, kind)(value)
    if kind == "type":
        known = getattr(builtins, value)
        return known if isinstance(known, type) else None
    return bytes.fromhex(value) if kind == "bytes" else value


class Solution:
    """The other process. Its functions are called by name; what they raise is raised here."""

    def __init__(self, file):
        self._process = subprocess.Popen(
            [sys.executable, "-I", os.path.abspath(__file__), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=os.path.dirname(file),
            start_new_session=True,
        )
        with open(file, encoding="utf-8") as source:
            self.ask({"load": source.read(), "file": file})

    def ask(self, message):
        mark = os.urandom(8).hex()
        self._process.stdin.write(json.dumps(dict(message, mark=mark)).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the solution ended the process it runs in")
        answer = json.loads(line)
        if answer.get("mark") != mark:
            raise RuntimeError("the solution answered what it was not asked")
        if "error" in answer:
            kind = getattr(builtins, answer["error"], None)
            known = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if known else RuntimeError)(answer["message"])
        return decode(answer["value"])

    def function(self, name):
        def call(*args, **kwargs):
            return self.ask({"call": name, "args": encode(args), "kwargs": encode(kwargs)})

        call.__name__ = name
        return call

    def kill(self):
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()


def serve():
    """The solution's side: it answers on what was its stdout, which its code no longer has."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    if os.getuid() == 0 and _nobody_can_read(os.__file__):
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    sys.setrecursionlimit(10000)
    space = {"__name__": "solution"}
    for line in questions:
        message = json.loads(line)
        try:
            value = encode(_answer(message, space))
            outcome = {"value": value}
        except BaseException as error:  # noqa: BLE001 - whatever the solution raises is an answer
            outcome = {"error": type(error).__name__, "message": str(error)[:2000]}
        answers.write(json.dumps(dict(outcome, mark=message["mark"])).encode() + b"\n")
        answers.flush()


def _nobody_can_read(path):
    """Whether this interpreter's own modules are there for a user without rights."""
    os.seteuid(_NOBODY)
    try:
        return os.access(path, os.R_OK, effective_ids=True)
    finally:
        os.seteuid(0)


def _answer(message, space):
    if "load" in message:
        exec(compile(message["load"], message["file"], "exec"), space)
        return None
    if "run" in message:
        exec(compile(message["run"], "tests", "exec"), space)
        return None
    return space[message["call"]](*decode(message["args"]), **decode(message["kwargs"]))


def check(cases):
    """Raises what the first failing test raises."""
    solution = Solution(cases["file"])
    try:
        if cases.get("together"):
            solution.ask({"run": cases["tests"]})
            return
        space = {"__name__": "tests"}
        exec(compile(cases.get("helpers") or "", "helpers", "exec"), space)
        space.update((name, solution.function(name)) for name in cases["functions"])
        exec(compile(ast.parse(cases["tests"]), "tests", "exec"), space)
    finally:
        solution.kill()


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        cases = json.load(file)
    os.remove(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        check(cases)
    except BaseException as error:  # noqa: BLE001 - the tests say what they want to
        print("FAILED: %s: %s" % (type(error).__name__, error))
        return 1
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1] == "--serve" else main())
