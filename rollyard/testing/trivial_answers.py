"""Answers that know nothing of a task: empty files, made-up constants, the question itself. One that earns a reward shows tests
that do not look at what was asked for."""

from __future__ import annotations

import base64
import re
import shlex

from rollyard.core.task import Task

_PATH = re.compile(
    r"(?<![\w/.:-])(/[\w.-]+(?:/[\w.-]+)*\.\w+|[\w-]+(?:/[\w.-]+)*\.(?:py|json|jsonl|csv|txt|md|ya?ml|toml|html|xml|sh|js|sql|log))\b"
)
_FUNCTION = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
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


def trivial_answers(task: Task) -> dict[str, str]:
    """Kind of answer -> the script that gives it."""
    paths = _paths(task)
    names = sorted({name for name in _FUNCTION.findall(task.instruction)} - _KEYWORDS)
    kinds = {"an empty": None, "a constant": "0", "an echoing": "args[0] if args else None"}
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
    return _CONSTANTS.get(path.rpartition(".")[2], "42\n") if value == "0" else question


def _paths(task: Task) -> list[str]:
    """Files that the instruction names, less the judge's."""
    found = dict.fromkeys(match.rstrip(".") for match in _PATH.findall(task.instruction))
    return [path for path in found if not path.startswith(_JUDGES_OWN)][:_MOST_FILES]


def _script(files: list[tuple[str, str]]) -> str:
    lines = ["#!/bin/sh"]
    for path, content in files:
        quoted, data = shlex.quote(path), base64.b64encode(content.encode()).decode()
        lines += [f'mkdir -p "$(dirname {quoted})"', f"echo {data} | base64 -d > {quoted}"]
    return "\n".join([*lines, "true", ""])
