"""Answers that know nothing of a task: empty files, made-up constants, the question's own example. One that earns a reward shows
tests that do not look at what was asked for."""

from __future__ import annotations

import base64
import json
import re
import shlex

from rollyard.core.task import Task

_PATH = re.compile(
    r"(?<![\w/.:-])(/[\w.-]+(?:/[\w.-]+)*\.\w+|[\w-]+(?:/[\w.-]+)*\.(?:py|json|jsonl|csv|txt|md|ya?ml|toml|html|xml|sh|js|sql|log))\b"
)
_FUNCTION = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.M | re.S)
_FIELD = re.compile(r"[`\"'](\w+)[`\"']\**\s*[:(=-]\s*(.{0,80})")
_VALUES = {
    "array": ["value"],
    "list": ["value"],
    "boolean": True,
    "true": True,
    "object": {},
    "string": "value",
    "text": "value",
}
_CODE = (".py", ".sh", ".js")
_JUDGES_OWN = ("/tests", "/solution", "/logs", "/proc", "/sys", "/dev", "/usr", "/etc", "/bin")
_KEYWORDS = {
    "assert",
    "def",
    "if",
    "for",
    "while",
    "print",
    "return",
    "not",
    "and",
    "or",
    "in",
    "lambda",
    "set",
    "list",
    "dict",
    "tuple",
}
_CONSTANTS = {
    "json": '{"result": 42, "status": "ok", "count": 1, "items": [{"id": 1, "name": "value"}]}\n',
    "jsonl": '{"result": 42, "status": "ok"}\n',
    "csv": "id,name,value\n1,value,42\n",
    "html": "<html><body>42</body></html>\n",
    "sh": "#!/bin/sh\necho 42\n",
}
_MOST_FILES = 20
_ECHO = "args[0] if args else None"


def trivial_answers(task: Task) -> dict[str, str]:
    """Kind of answer -> the script that gives it."""
    paths = _paths(task)
    names = sorted({name for name in _FUNCTION.findall(task.instruction)} - _KEYWORDS)
    kinds = {"an empty": None, "a constant": "0", "an echoing": _ECHO}
    return {
        kind: _script([(path, _content(path, names, value, task.instruction)) for path in paths])
        for kind, value in kinds.items()
    }


def _content(path: str, names: list[str], value: str | None, question: str) -> str:
    """What a file says: `value` is what every function gives back, None means nothing at all."""
    if value is None:
        return ""
    if path.endswith(".py"):
        return "".join(f"def {name}(*args, **kwargs):\n    return {value}\n" for name in names)
    ending = path.rpartition(".")[2]
    if value == _ECHO:
        return _find_example(path, ending, question)
    fields = _make_up(question) if ending == "json" else {}
    return f"{json.dumps(fields)}\n" if fields else _CONSTANTS.get(ending, "42\n")


def _find_example(path: str, ending: str, question: str) -> str:
    """What the question shows of such a file, in a block after the file's name or else anywhere; or the whole question."""
    blocks = [(found.start(), found[1].lower(), found[2]) for found in _BLOCK.finditer(question)]
    named = question.find(path)
    after = [block for block in blocks if block[0] > named]
    fitting = [
        text for _, kind, text in (*after, *blocks) if kind == ending or kind in ("", "text", "txt", "plaintext")
    ]
    return fitting[0] if fitting else question


def _make_up(question: str) -> dict[str, object]:
    """A value for each field that the question names, of the kind it says."""
    found = _FIELD.findall(question)
    return {name: next((value for word, value in _VALUES.items() if word in said.lower()), 42) for name, said in found}


def _paths(task: Task) -> list[str]:
    """Files that the instruction names, less the judge's."""
    found = dict.fromkeys(match.rstrip(".") for match in _PATH.findall(task.instruction))
    return [path for path in found if not path.startswith(_JUDGES_OWN)][:_MOST_FILES]


def _script(files: list[tuple[str, str]]) -> str:
    """Data that is there already is what the task gives, and stays; a program that is there is what is to be changed."""
    lines = ["#!/bin/sh"]
    for path, content in files:
        quoted, data = shlex.quote(path), base64.b64encode(content.encode()).decode()
        unless = "" if path.endswith(_CODE) else f"[ -e {quoted} ] || "
        lines += [f'mkdir -p "$(dirname {quoted})"', f"{unless}echo {data} | base64 -d > {quoted}"]
    return "\n".join([*lines, "true", ""])
